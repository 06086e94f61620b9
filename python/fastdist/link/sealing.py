"""Proof of a job's secret, and encryption: the handshake Noise_NNpsk0_25519_AESGCM_SHA256.

See https://noiseprotocol.org/noise.html, revision 34; the names are those of the specification.
Anyone who learns the secret later cannot decrypt earlier traffic.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    raise ImportError(
        "encrypted connections need cryptography: pip install 'cryptography>=47'",
        name="cryptography",
    ) from None

_NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"  # as long as a hash
_PUBLIC_BYTES = 32
_TAG_BYTES = 16
MESSAGE_BYTES = _PUBLIC_BYTES + _TAG_BYTES  # of the handshake, without a payload


class Cipher:
    """Encrypts or decrypts the records of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._nonces = (bytes(4) + number.to_bytes(8, "big") for number in itertools.count())

    def seal(self, record: Any, out: Any, hash: bytes | None = None) -> None:
        """Encrypt a record into memory that also has room for its tag."""
        self._cipher.encrypt_into(next(self._nonces), record, hash, out)

    def open(self, sealed: Any, out: Any, hash: bytes | None = None) -> None:
        """Decrypt a record; raise ConnectionError if it is not the peer's next one."""
        try:
            self._cipher.decrypt_into(next(self._nonces), sealed, hash, out)
        except InvalidTag:
            raise ConnectionError("a record that the peer has not made") from None


class Handshake:
    """One end of a connection before it is encrypted: the initiator writes first.

    Both ends have the secret of 32 bytes, and must agree on the prologue. `hash` is that of all
    that they have sent.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        is_initiator: bool,
        prologue: bytes,
        private: X25519PrivateKey | None = None,
    ) -> None:
        self._is_initiator = is_initiator
        self._private = private or X25519PrivateKey.generate()
        self._peer: X25519PublicKey | None = None
        self.hash = self._chaining_key = _NAME
        self._mix_hash(prologue)
        self._chaining_key, hashed, key = self._derived(secret, 3)  # psk
        self._mix_hash(hashed)
        self._cipher = Cipher(key)

    def write(self, payload: bytes = b"") -> bytes:
        """Return this end's message."""
        own = self._private.public_key().public_bytes_raw()
        self._mix(own, is_second=not self._is_initiator)
        sealed = bytearray(len(payload) + _TAG_BYTES)
        self._cipher.seal(payload, sealed, self.hash)
        self._mix_hash(sealed)
        return own + sealed

    def read(self, message: bytes) -> bytes:
        """Return the payload of the peer's message.

        Raises:
            ConnectionError: the peer has another secret, or has agreed on another prologue.
        """
        public, sealed = message[:_PUBLIC_BYTES], message[_PUBLIC_BYTES:]
        self._peer = X25519PublicKey.from_public_bytes(public)
        try:
            payload = bytearray(len(sealed) - _TAG_BYTES)
            self._mix(public, is_second=self._is_initiator)
            self._cipher.open(sealed, payload, self.hash)
        except (ConnectionError, ValueError):
            raise ConnectionError("the peer has another secret") from None
        self._mix_hash(sealed)
        return bytes(payload)

    def split(self) -> tuple[Cipher, Cipher]:
        """Return the ciphers for sending and for receiving, after both messages."""
        first, second = map(Cipher, self._derived(b"", 2))
        return (first, second) if self._is_initiator else (second, first)

    def _mix(self, public: bytes, *, is_second: bool) -> None:
        """Mix in a public key, and at the second message what both keys have in common."""
        self._mix_hash(public)
        self._mix_key(public)
        if is_second:
            assert self._peer is not None
            self._mix_key(self._private.exchange(self._peer))

    def _mix_hash(self, data: bytes | bytearray) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def _mix_key(self, material: bytes) -> None:
        self._chaining_key, key = self._derived(material, 2)
        self._cipher = Cipher(key)

    def _derived(self, material: bytes, count: int) -> list[bytes]:
        whole = HKDF(SHA256(), 32 * count, self._chaining_key, b"").derive(material)
        return [whole[i : i + 32] for i in range(0, len(whole), 32)]
