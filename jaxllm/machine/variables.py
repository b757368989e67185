"""Names of environment variables that more than one room reads."""

SECRET, SECRET_FILE = "JAXLLM_SECRET", "JAXLLM_SECRET_FILE"
