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
MESSAGE_BYTES = _PUBLIC_BYTES + 16  # of the handshake, without a payload


class StrangerError(ConnectionError):
    """The peer does not have the job's secret, or its messages were changed on the way."""


class Cipher:
    """Encrypts or decrypts the records of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._nonces = (bytes(4) + number.to_bytes(8, "big") for number in itertools.count())

    def seal(self, record: Any, out: Any, hash: bytes | None = None) -> None:
        """Encrypt a record into memory that also has room for its tag."""
        self._cipher.encrypt_into(next(self._nonces), record, hash, out)

    def open(self, sealed: Any, out: Any, hash: bytes | None = None) -> None:
        """Decrypt a record; raise StrangerError if it is not the peer's next record."""
        try:
            self._cipher.decrypt_into(next(self._nonces), sealed, hash, out)
        except InvalidTag:
            raise StrangerError("a record that the peer has not made") from None


class _SymmetricState:
    """The hash of all that both ends have sent, and the keys that come of it."""

    def __init__(self) -> None:
        self.hash = self._chaining_key = _NAME
        self._cipher: Cipher

    def mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def mix_key(self, material: bytes) -> None:
        self._chaining_key, key = self._derived(material, 2)
        self._cipher = Cipher(key)

    def mix_key_and_hash(self, material: bytes) -> None:
        self._chaining_key, hashed, key = self._derived(material, 3)
        self.mix_hash(hashed)
        self._cipher = Cipher(key)

    def encrypt_and_hash(self, text: bytes) -> bytes:
        sealed = bytearray(len(text) + 16)
        self._cipher.seal(text, sealed, self.hash)
        self.mix_hash(message := bytes(sealed))
        return message

    def decrypt_and_hash(self, sealed: bytes) -> bytes:
        text = bytearray(len(sealed) - 16)
        self._cipher.open(sealed, text, self.hash)
        self.mix_hash(sealed)
        return bytes(text)

    def split(self) -> tuple[Cipher, Cipher]:
        first, second = self._derived(b"", 2)
        return Cipher(first), Cipher(second)

    def _derived(self, material: bytes, count: int) -> list[bytes]:
        whole = HKDF(SHA256(), 32 * count, self._chaining_key, b"").derive(material)
        return [whole[i : i + 32] for i in range(0, len(whole), 32)]


class Handshake:
    """One end of a connection before it is encrypted: the initiator writes first.

    Args:
        secret: 32 bytes, which both ends have.
        is_initiator: True at the end that has connected.
        prologue: bytes that both ends must agree on.
        private: the key pair of this connection; a new one by default.
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
        self._state = _SymmetricState()
        self._state.mix_hash(prologue)
        self._state.mix_key_and_hash(secret)  # psk

    @property
    def hash(self) -> bytes:
        """The hash of the handshake."""
        return self._state.hash

    def write(self, payload: bytes = b"") -> bytes:
        """Return this end's message."""
        own = self._private.public_key().public_bytes_raw()
        self._mix(own, is_second=not self._is_initiator)
        return own + self._state.encrypt_and_hash(payload)

    def read(self, message: bytes) -> bytes:
        """Return the payload of the peer's message.

        Raises:
            StrangerError: the peer has another secret, or has agreed on another prologue.
        """
        public = message[:_PUBLIC_BYTES]
        self._peer = X25519PublicKey.from_public_bytes(public)
        try:
            self._mix(public, is_second=self._is_initiator)
            return self._state.decrypt_and_hash(message[_PUBLIC_BYTES:])
        except (StrangerError, ValueError):
            raise StrangerError("the peer has another secret") from None

    def _mix(self, public: bytes, *, is_second: bool) -> None:
        """Mix in a public key, and at the second message what both keys have in common."""
        self._state.mix_hash(public)
        self._state.mix_key(public)
        if is_second:
            assert self._peer is not None
            self._state.mix_key(self._private.exchange(self._peer))

    def split(self) -> tuple[Cipher, Cipher]:
        """Return the ciphers for sending and for receiving, after both messages."""
        first, second = self._state.split()
        return (first, second) if self._is_initiator else (second, first)
