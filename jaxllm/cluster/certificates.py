"""Mutual TLS for JAX's coordinator, by a certificate that all processes of a run derive from their secret.

JAX takes the paths of a certificate, its key and a CA; each end requires that the CA has signed the other's certificate. Here
one certificate is both: a process is taken if it has the key, and it has the key if it has the secret. No file travels.
"""

import datetime
import hmac
import os

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Keys of the curve P-256 are the numbers below it (SP 800-186)."""
VALID = (datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31))
"""The clocks of hosts may differ, and no key outlives its run."""
PREFIX = "jaxllm://run/"
"""The certificate's name: a coordinator's address may be none of its host's names, so that JAX compares this instead."""


def arguments(secret: bytes, salt: str) -> dict[str, str]:
    """Arguments of jax.distributed.initialize. The files are in this process's memory (Linux), and end with it."""
    paths = []
    for content in certificate_and_key(secret, salt):
        descriptor = os.memfd_create("jaxllm")
        os.write(descriptor, content)
        paths.append(f"/proc/self/fd/{descriptor}")
    certificate, key = paths
    return {"mtls_cert_file": certificate, "mtls_key_file": key, "mtls_ca_file": certificate, "mtls_peer_uri_prefix": PREFIX}


def certificate_and_key(secret: bytes, salt: str) -> tuple[bytes, bytes]:
    """In PEM; the same for the same arguments."""
    derived = hmac.digest(secret, f"jaxllm certificate 1 key {salt}".encode(), "sha512")
    # From 1 to ORDER - 1, each as likely: the remainder of 512 bits is negligibly uneven.
    key = ec.derive_private_key(1 + int.from_bytes(derived) % (ORDER - 1), ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "jaxllm")])
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(PREFIX)])
    content = x509.CertificateBuilder(name, name, key.public_key(), 1, *VALID).add_extension(names, critical=False)
    certificate = content.sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return certificate.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
