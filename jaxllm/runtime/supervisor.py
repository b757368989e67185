"""Old name of jaxllm.cluster.supervisor for `python -m jaxllm.runtime.supervisor`, kept for one version."""

from jaxllm.cluster.supervisor import main

if __name__ == "__main__":
    raise SystemExit(main())
