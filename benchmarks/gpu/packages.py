"""Packages for a machine with a GPU and without a network: from wheels to two small archives there.

python benchmarks/gpu/packages.py pack WHEELS FOLDER [ARCH]
python benchmarks/gpu/packages.py unpack FOLDER SITE

``pack`` leaves out what an image with torch has, what vLLM imports for kernels that the steps never
call, and of its shared objects the device code of other cards than ARCH (90: H100, H200). vLLM
0.26.0 and all that it needs, 1.2 GB of wheels, become two archives of 28 and 41 MB. What is
unpacked runs on that card alone.
"""

from __future__ import annotations

import re
import shutil
import struct
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IN_THE_IMAGE = """
aiohttp anyio attrs certifi charset_normalizer click cloudpickle cuda_bindings cuda_core
cuda_python einops frozenlist grpcio h11 hf_xet httpcore httpx huggingface_hub hypothesis idna
iniconfig llvmlite markdown_it_py mdurl ml_dtypes multidict ninja numba numpy nvidia_ml_py
opencv_python_headless packaging pillow pluggy prometheus_client propcache protobuf psutil pyarrow
pygments pytest pyyaml regex requests rich safetensors sentencepiece setuptools shellingham six
sortedcontainers tabulate tiktoken tokenizers torchaudio torchvision tqdm transformers typer
urllib3 uvloop yarl
"""
NEVER_CALLED = """
anthropic cffi cryptography cuda_tile dill fastapi_cli fastapi_cloud_cli fastar fastsafetensors
flashinfer_python humming_kernels nvidia_cu* nvidia_nvvm pycparser pynvvideocodec quack_kernels
rignore sentry_sdk supervisor tilelang tokenspeed_* torch_c_dlpack_ext torchcodec z3_solver
"""
UNUSED_FILES = ("mistral_common/data/*", "pycountry/locales/*", "vllm/third_party/*/include/*",
                "vllm/third_party/fmha_sm100/cutlass/*", "vllm/vllm-rs")  # fmt: skip
OTHER_CARDS = {"90": ("vllm/vllm_flash_attn/_vllm_fa2_C*",)}
"""Shared objects that vLLM does without on a card, for it has newer ones."""
OBJECTS = "kernels.tar.xz"


def pack(wheels: Path, folder: Path, arch: str = "90") -> None:
    """Write the archives of a folder of wheels, for one card."""
    folder.mkdir(parents=True, exist_ok=True)
    left_out = (IN_THE_IMAGE + NEVER_CALLED).split()
    with tempfile.TemporaryDirectory() as name:
        site = Path(name)
        for wheel in sorted(wheels.glob("*.whl")):
            package = wheel.name.partition("-")[0]
            if not any(fnmatch(package.lower(), one) for one in left_out):
                with zipfile.ZipFile(wheel) as opened:
                    opened.extractall(site)
        parts: dict[str, list[Path]] = {"packages.tar.xz": [], OBJECTS: []}
        this = {wheel.name.split("-")[2] for wheel in wheels.glob("numpy-*.whl")}
        for path in sorted(path for path in site.rglob("*") if path.is_file()):
            inside = path.relative_to(site)
            dropped = (*UNUSED_FILES, *OTHER_CARDS.get(arch, ()))
            other = {f"cp{digits}" for digits in re.findall(r"\.cpython-(\d+)-", path.name)} - this
            if other or any(fnmatch(str(inside), pattern) for pattern in dropped):
                continue
            device_code = path.suffix == ".so" and without_other_cards(path, int(arch))
            parts[OBJECTS if device_code else "packages.tar.xz"].append(inside)
        for archive, files in parts.items():
            with tarfile.open(folder / archive, "w:xz") as opened:
                for inside in files:
                    opened.add(site / inside, str(inside))
            print(f"{folder / archive}: {(folder / archive).stat().st_size / 1e6:.1f} MB")


FATBIN = struct.pack("<I", 0xBA55ED50)
PTX, ELF = 1, 2


def without_other_cards(path: Path, arch: int) -> bool:
    """Blank the device code that a card does not run; return whether the file has any.

    A fat binary is ``magic, version, header size, size`` and entries ``kind, -, header size, size``
    with the architecture at byte 28. Assembler that a driver would compile stays where nothing is
    compiled for the card.
    """
    data = bytearray(path.read_bytes())
    at, found = data.find(FATBIN), False
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        if (version, header) != (1, 16) or at + header + size > len(data):
            at = data.find(FATBIN, at + 4)
            continue
        entry, end, entries = at + header, at + header + size, []
        while entry < end:
            kind, _, begin, length = struct.unpack_from("<HHIQ", data, entry)
            entries.append(
                (kind, struct.unpack_from("<I", data, entry + 28)[0], entry + begin, length)
            )
            entry += begin + length
        compiled = any((kind, of) == (ELF, arch) for kind, of, _, _ in entries)
        for kind, of, begin, length in entries:
            if (kind, of) != (ELF, arch) and (compiled or kind != PTX):
                data[begin : begin + length] = bytes(length)
        at, found = data.find(FATBIN, end), True
    if found:
        path.write_bytes(data)
    return found


def unpack(folder: Path, site: Path) -> None:
    """Unpack archives that a folder has not yet, and name this package there."""
    site.mkdir(parents=True, exist_ok=True)
    for archive in sorted(folder.glob("*.tar.xz")):
        done = site / f".{archive.name}"
        if not done.exists():
            with tarfile.open(archive) as opened:
                opened.extractall(site, filter="data")
            done.touch()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Commands and plugins are found by it.
    metadata = site / f"actds-{project['version']}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Name: actds\nVersion: {project['version']}\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def main() -> None:
    match sys.argv[1:]:
        case ["pack", wheels, folder, *arch]:
            shutil.rmtree(folder, ignore_errors=True)
            pack(Path(wheels), Path(folder), *arch)
        case ["unpack", folder, site]:
            unpack(Path(folder), Path(site))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
