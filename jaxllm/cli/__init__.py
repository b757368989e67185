"""The command line. `main` is where an installation of the last version looks for it."""


def main() -> None:
    from jaxllm.cli.app import main

    main()
