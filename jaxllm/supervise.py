"""Old name of jaxllm.runtime.supervisor for `python -m jaxllm.supervise`, kept for one version."""

from jaxllm.runtime.supervisor import main

if __name__ == "__main__":
    raise SystemExit(main())
