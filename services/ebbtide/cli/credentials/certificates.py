"""Makes a development authority and issues its certificates: ECDSA on P-256, hosts and roles as alternative names.

Invariant: a folder holds one authority (`ca.pem`, `ca.key`) and a pair `NAME.pem`, `NAME.key` per certificate. Files
are replaced as a whole; only the owner can read keys. A process that dies between the two files of a pair leaves halves
that do not match: readers keep the former pair, and renewing again repairs it.
"""

import datetime as dt
import ipaddress
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ebbtide.auth.credential_files import ROLE_URI, roles_of
from ebbtide.auth.roles import Role
from ebbtide.errors import AlreadyExists, InvalidRequest
from ebbtide.types.ids import check_id

CA: Final = "ca"
#: Certificates begin earlier by this, as clocks of other machines may be slow.
_EARLIER: Final = dt.timedelta(minutes=5)


class IssuedCertificate(NamedTuple):
    name: str
    roles: tuple[Role, ...]
    hosts: tuple[str, ...]
    expires: dt.datetime
    lifetime: dt.timedelta

    def left(self, now: dt.datetime) -> dt.timedelta:
        return self.expires - now


def init(folder: Path, days: int) -> Path:
    """Makes an authority. Raises `AlreadyExists` if there is one, as it could not be restored."""
    if (folder / f"{CA}.key").exists() or (folder / f"{CA}.pem").exists():
        raise AlreadyExists(f"{folder} has an authority already; name another folder, or remove its files first")
    make_folder(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Ebbtide authority {os.urandom(4).hex()}")])
    builder = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
    )
    _write_pair(folder, CA, key, builder.sign(key, hashes.SHA256()))
    return folder / f"{CA}.pem"


def issue(folder: Path, name: str, roles: Sequence[Role], hosts: Sequence[str], days: int) -> Path:
    """Makes a certificate and its key. Raises `AlreadyExists` for a name in use, and `InvalidRequest`."""
    if check_id(name, field="--name") == CA:
        raise InvalidRequest("names the authority itself; take another name", field="--name")
    if (folder / f"{name}.pem").exists():
        raise AlreadyExists(f"{folder} has a certificate named {name} already; renew it, or take another name")
    if (folder / f"{name}.key").exists():  # such as tokens.key, which has no copy
        raise AlreadyExists(f"{folder} has a {name}.key already, which belongs to no certificate; take another name")
    return _issue(folder, name, roles, [_host(host) for host in hosts], days)


def renew(folder: Path, name: str, days: int) -> Path:
    """Replaces a certificate and its key by new ones with the same roles and hosts. Raises `InvalidRequest`."""
    if name == CA:
        text = "cannot be renewed in place: make another authority, and trust both meanwhile (docs/deploy/security.md)"
        raise InvalidRequest(text, field=name)
    found = read(folder, name)
    return _issue(folder, name, found.roles, [_host(host) for host in found.hosts], days or found.lifetime.days)


def names(folder: Path) -> list[str]:
    """Names of the folder's certificates, the authority first. Raises `InvalidRequest` if there is no authority."""
    if not (folder / f"{CA}.pem").exists():
        raise InvalidRequest(f"{folder} has no authority; ebbtide certs init makes one", field="--dir")
    issued = sorted(path.stem for path in folder.glob("*.pem") if path.with_suffix(".key").exists())
    return [CA, *(name for name in issued if name != CA)]


def read(folder: Path, name: str) -> IssuedCertificate:
    """Reads a certificate. Raises `InvalidRequest` naming the file."""
    found = _certificate(folder, name)
    lifetime = found.not_valid_after_utc - found.not_valid_before_utc - _EARLIER
    names = _names_of(found)
    roles = tuple(sorted(roles_of(names.get_values_for_type(x509.UniformResourceIdentifier))))
    hosts = (
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    )
    return IssuedCertificate(name, roles, hosts, found.not_valid_after_utc, lifetime)


def read_all(folder: Path) -> tuple[list[IssuedCertificate], list[InvalidRequest]]:
    """Reads the folder's certificates, the authority first. Returns them, and the errors of unreadable ones."""
    found: list[IssuedCertificate] = []
    faults: list[InvalidRequest] = []
    for name in names(folder):
        try:
            found.append(read(folder, name))
        except InvalidRequest as error:
            faults.append(error)
    return found, faults


def _issue(folder: Path, name: str, roles: Sequence[Role], hosts: Sequence[x509.GeneralName], days: int) -> Path:
    authority, signer = _certificate(folder, CA), _key(folder, CA)
    uris = [x509.UniformResourceIdentifier(f"{ROLE_URI}{role}") for role in roles]
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(subject, authority.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName([*uris, *hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    certificate = builder.sign(signer, hashes.SHA256())
    if certificate.not_valid_after_utc > authority.not_valid_after_utc:
        text = f"outlives the authority, which ends on {authority.not_valid_after_utc:%Y-%m-%d}; give fewer"
        raise InvalidRequest(text, field="--days")
    _write_pair(folder, name, key, certificate)
    return folder / f"{name}.pem"


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    if not text or not text.isascii() or not text.replace("-", "").replace(".", "").replace("*", "").isalnum():
        raise InvalidRequest(f"{text!r} is no host: give a name or an IP address, without a port", field="--host")
    return x509.DNSName(text)


def _names_of(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def _certificate(folder: Path, name: str) -> x509.Certificate:
    path = folder / f"{name}.pem"
    try:
        return x509.load_pem_x509_certificate(read_file(path))
    except ValueError:
        raise InvalidRequest("is no certificate in PEM", field=str(path)) from None


def _key(folder: Path, name: str) -> ec.EllipticCurvePrivateKey:
    path = folder / f"{name}.key"
    try:
        key = load_pem_private_key(read_file(path), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidRequest("is no private key of an authority made by ebbtide certs init", field=str(path))
    return key


def _write_pair(folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_file(folder / f"{name}.key", private, mode=0o600)
    write_file(folder / f"{name}.pem", certificate.public_bytes(Encoding.PEM), mode=0o644)


def make_folder(folder: Path) -> None:
    """Makes a folder that only its owner can read. Raises `InvalidRequest`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be made ({error.strerror})", field="--dir") from None


def read_file(path: Path) -> bytes:
    """Raises `InvalidRequest` naming the file if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot be read ({error.strerror})", field=str(path)) from None


def write_file(path: Path, data: bytes, *, mode: int) -> None:
    """Replaces a file as a whole. Raises `InvalidRequest` if it cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            file.write(data)
        Path(file.name).chmod(mode)
        Path(file.name).replace(path)
    except OSError as error:
        raise InvalidRequest(f"cannot be written ({error.strerror})", field=str(path)) from None
