"""Signatures of publishers: Ed25519 (RFC 8032) over root digests, which bind all else.

A root already says which kind of thing it is of, for each kind derives its digest by a context of its own.
"""

from typing import Final

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ebbtide.errors import InvalidRequest, PermissionDenied
from ebbtide.types.weights import KEY_BYTES, SIGNATURE_BYTES, Manifest, Patch

_CONFIG: Final = "ebbtide 2026-11 model configuration"


class Signer:
    """A publisher's private key."""

    def __init__(self, seed: bytes) -> None:
        """`seed`: the key's 32 secret bytes. Raises `InvalidRequest` for another length."""
        if len(seed) != KEY_BYTES:
            raise InvalidRequest(f"must have {KEY_BYTES} bytes", field="publisher_seed")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, manifest: Manifest) -> Manifest:
        """The manifest with this key's signature of its root, and of its configuration if it has one."""
        signature = self._key.sign(manifest.version.root)
        of_config = self._key.sign(_bound(manifest)) if manifest.config else b""
        return msgspec.structs.replace(manifest, publisher=self.public, signature=signature, config_signature=of_config)

    def sign_patch(self, patch: Patch) -> Patch:
        """The patch with this key's signature of its root."""
        return msgspec.structs.replace(patch, signature=self._key.sign(patch.root))


def check_signature(manifest: Manifest, publisher: bytes = b"") -> None:
    """Refuse a manifest that is not signed by the key that it names, and by `publisher` where that is known.

    The root itself is for `check_manifest`. Raises `PermissionDenied`.
    """
    if publisher and manifest.publisher != publisher:
        raise PermissionDenied("the manifest is signed by another key than the run's publisher's")
    _check(manifest.publisher, manifest.signature, manifest.version.root, "manifest")
    if manifest.config:
        _check(manifest.publisher, manifest.config_signature, _bound(manifest), "model's configuration")


def _bound(manifest: Manifest) -> bytes:
    """A digest of a version's root and its configuration together."""
    bound = blake3(derive_key_context=_CONFIG)
    bound.update(manifest.version.root)  # of one length
    bound.update(manifest.config)
    return bound.digest()


def check_patch_signature(patch: Patch, publisher: bytes) -> None:
    """Refuse a patch that `publisher` did not sign; its root is for `check_patch`. Raises `PermissionDenied`."""
    _check(publisher, patch.signature, patch.root, "patch")


def _check(key: bytes, signature: bytes, root: bytes, what: str) -> None:
    if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        raise PermissionDenied(f"the {what} is not signed")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, root)
    except (InvalidSignature, ValueError):
        raise PermissionDenied(f"the signature of the {what} is not that of its publisher's key") from None
