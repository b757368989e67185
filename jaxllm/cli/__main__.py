"""python -m jaxllm.cli: the command line, where the script `jaxllm` is not installed."""

from jaxllm.cli.app import main

if __name__ == "__main__":
    main()
