"""Keys that the tests of trust share, and a dataset that may be changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from actds_testing.synthetic import make_dataset

Pair = tuple[Path, Path]


@pytest.fixture
def pair(tmp_path: Path) -> Callable[[str], Pair]:
    """Return a function that makes a key pair: the private file and the public one."""

    def make(name: str) -> Pair:
        key = Ed25519PrivateKey.generate()
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        public.write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        return private, public

    return make


@pytest.fixture(scope="session")
def _original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("trust") / "acts", n_requests=8, seed=3, drops=True)


@pytest.fixture
def acts(_original: Path, tmp_path: Path) -> Path:
    """Return a sealed dataset of one run, to be changed."""
    return Path(shutil.copytree(_original, tmp_path / "acts"))
