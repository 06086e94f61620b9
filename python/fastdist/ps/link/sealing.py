"""Proof of a job's secret, and encryption: X25519, HMAC-SHA256, HKDF and AES-256-GCM.

Both ends make a key pair for the connection, and prove that they have the secret by an HMAC of both
public keys. The keys of the traffic are derived from the secret and from the key exchange, so
anyone who learns the secret later cannot decrypt earlier traffic.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from typing import Any

from fastdist.ps.link.keys import Keys

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    raise ImportError(
        "keys need cryptography: pip install 'cryptography>=47'", name="cryptography"
    ) from None

PUBLIC_BYTES = PROOF_BYTES = 32
_ENDS = (b"connector", b"listener")


class StrangerError(ConnectionError):
    """The peer does not have the job's secret, or its messages were changed on the way."""


class Introduction:
    """One end of a connection before it is encrypted.

    Args:
        keys: the job's keys.
        is_listener: True at the end that listens.
        greeting: the bytes of the greeting that both ends agree on.

    Attributes:
        public: this end's public key, to send to the peer.
        proof: this end's proof of the secret, set by `take`.
        ciphers: the ciphers for sending and for receiving, set by `take`.
    """

    def __init__(self, keys: Keys, is_listener: bool, greeting: bytes) -> None:
        self._secret = bytes.fromhex(keys.secret)
        self._is_listener = is_listener
        self._greeting = greeting
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def take(self, public: bytes) -> None:
        """Take the peer's public key; raise StrangerError if it is not a public key."""
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise StrangerError("not a public key") from None
        pair = (public, self.public) if self._is_listener else (self.public, public)
        said = self._greeting + b"".join(pair)
        proofs = [hmac.digest(self._secret, end + said, hashlib.sha256) for end in _ENDS]
        made = HKDF(SHA256(), 64, self._secret, b"fastdist " + said).derive(shared)
        own, other = (1, 0) if self._is_listener else (0, 1)
        ciphers = Cipher(made[:32]), Cipher(made[32:])
        self.proof, self._expected = proofs[own], proofs[other]
        self.ciphers = ciphers[own], ciphers[other]

    def check(self, proof: bytes) -> None:
        """Raise StrangerError unless the peer has proved that it has the secret."""
        if not hmac.compare_digest(proof, self._expected):
            raise StrangerError("the peer has another secret")


class Cipher:
    """Encrypts or decrypts the records of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._nonces = (number.to_bytes(12, "little") for number in itertools.count(1))

    def seal(self, record: Any, out: memoryview) -> None:
        """Encrypt a record into memory that also has room for its tag."""
        self._cipher.encrypt_into(next(self._nonces), record, None, out)

    def open(self, sealed: memoryview, out: memoryview) -> None:
        """Decrypt a record; raise StrangerError if it is not the peer's next record."""
        try:
            self._cipher.decrypt_into(next(self._nonces), sealed, None, out)
        except InvalidTag:
            raise StrangerError("a record that the peer has not made") from None
