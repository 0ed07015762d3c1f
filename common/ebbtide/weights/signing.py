"""Signs and verifies the root digests of manifests and patches with a publisher's key: Ed25519 (RFC 8032).

A root binds everything else. It also tells a manifest from a patch, because each kind derives its digest with its own
context.
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
        """Take the key's 32 secret bytes. Raises `InvalidRequest` for another length."""
        if len(seed) != KEY_BYTES:
            raise InvalidRequest(f"must have {KEY_BYTES} bytes", field="publisher_seed")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, manifest: Manifest) -> Manifest:
        """Return the manifest with signatures of its root and of its configuration, if it has one."""
        signature = self._key.sign(manifest.version.root)
        of_config = self._key.sign(_bound(manifest)) if manifest.config else b""
        return msgspec.structs.replace(manifest, publisher=self.public, signature=signature, config_signature=of_config)

    def sign_patch(self, patch: Patch) -> Patch:
        """Return the patch with a signature of its root."""
        return msgspec.structs.replace(patch, signature=self._key.sign(patch.root))


def check_signature(manifest: Manifest, publisher: bytes = b"") -> None:
    """Raise `PermissionDenied` unless the manifest's own key signed it, and that key is `publisher` where given.

    `check_manifest` checks the root itself.
    """
    if publisher and manifest.publisher != publisher:
        raise PermissionDenied("the manifest is signed by another key than the run's publisher's")
    _check(manifest.publisher, manifest.signature, manifest.version.root, "manifest")
    if manifest.config:
        _check(manifest.publisher, manifest.config_signature, _bound(manifest), "model's configuration")


def _bound(manifest: Manifest) -> bytes:
    """Return a digest of a version's root and its configuration together."""
    bound = blake3(derive_key_context=_CONFIG)
    bound.update(manifest.version.root)  # has a fixed length
    bound.update(manifest.config)
    return bound.digest()


def check_patch_signature(patch: Patch, publisher: bytes) -> None:
    """Raise `PermissionDenied` unless `publisher` signed the patch. `check_patch` checks the root itself."""
    _check(publisher, patch.signature, patch.root, "patch")


def _check(key: bytes, signature: bytes, root: bytes, what: str) -> None:
    if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        raise PermissionDenied(f"the {what} is not signed")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, root)
    except (InvalidSignature, ValueError):
        raise PermissionDenied(f"the signature of the {what} is not that of its publisher's key") from None
