"""SIGKILL and a full disk at random instants of crop and encode: no partial shard, and the same bytes in the end."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from image_diffusion.core.config.base import dump, to_yaml
from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import read_record, record_path
from warm import warm_python

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("IMAGE_DIFFUSION_KILLS", "10"))
SHARDS = 6

# Encodes with a codec of two lines: only the writing is tested. A short sleep per batch lengthens the time to hit.
ENCODE = """
import sys, time
from pathlib import Path
import torch
from image_diffusion.core.process.command import run
from image_diffusion.data.encoded.latents import EncodeConfig, encode_shards, write_manifest

class Codec:
    identity = {"name": "toy"}
    def encode(self, images):
        time.sleep(0.003)
        return torch.stack([images.float() / 256, torch.ones_like(images, dtype=torch.float32)], dim=1)

def main():
    crops, output = Path(sys.argv[1]), Path(sys.argv[2])
    encode_shards(crops, output, Codec(), EncodeConfig(batch_size=8), torch.device("cpu"))
    write_manifest(crops, output, Codec(), EncodeConfig(batch_size=8))

run(main)
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two thousand images of 24 x 24 pixels, and the stage's configuration."""
    folder = tmp_path_factory.mktemp("images")
    pixels = np.random.default_rng(0).integers(0, 256, (2000, 24, 24, 3), dtype=np.uint8)
    for number, each in enumerate(pixels):
        path = folder / f"in/{number % 4}/{number:04d}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"P6 24 24 255\n" + each.tobytes())
    source = {"type": "folder", "path": str(folder / "in")}
    config = DataConfig(name="x", source=source, resolution=16, num_shards=SHARDS)  # type: ignore[arg-type]
    (folder / "data.yaml").write_text(to_yaml(dump(config)))
    return folder


def crop_command(images: Path, output: Path) -> list[str]:
    arguments = ["--config", str(images / "data.yaml"), "--output", str(output / "manifest.json")]
    return [warm_python(), "-m", "image_diffusion", "crop", *arguments]


@pytest.fixture(scope="module")
def encode_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "encode.py"
    path.write_text(ENCODE)
    return path


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def started(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a command. Its output ends when the last of its processes is gone."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def killed(command: list[str], output: Path, after_s: float) -> None:
    """Start a command and kill it some time after it began to write. Return when all of its processes are gone."""
    before = set(output.iterdir()) if output.exists() else set()
    process = started(command)
    while process.poll() is None and (not output.exists() or set(output.iterdir()) == before):
        time.sleep(0.001)
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def check_nothing_is_half(folder: Path) -> int:
    """Check that every shard with a record matches it. Return the number of these shards."""
    whole = 0
    for shard in range(SHARDS):
        if record_path(folder, shard).exists():
            record = read_record(folder, shard)
            tar = folder / f"shard-{shard:05d}.tar"
            assert (sha256_file(tar), tar.stat().st_size) == (record.sha256, record.bytes)
            whole += 1
    return whole


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return all files but the note of verified files, which contains times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".verified.json"}


def kill_again_and_again(command: list[str], output: Path, kills: int) -> None:
    """Kill a command at random instants of its writing, in folders in every state of progress, then let it finish."""
    chance = random.Random(kills)
    for _ in range(kills):
        killed(command, output, chance.uniform(0, 0.12))
        check_nothing_is_half(output)
        if (output / "manifest.json").exists():  # it was done before the signal came: start over
            shutil.rmtree(output)
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert check_nothing_is_half(output) == SHARDS


@pytest.fixture(scope="module")
def crops(images: Path) -> Path:
    done = run(crop_command(images, images / "crops"))
    assert done.returncode == 0, done.stderr
    return images / "crops"


def test_crop_killed_anywhere_ends_with_the_same_bytes(images: Path, crops: Path, tmp_path: Path) -> None:
    kill_again_and_again(crop_command(images, tmp_path / "out"), tmp_path / "out", KILLS)
    assert bytes_of(tmp_path / "out") == bytes_of(crops)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "time limit"])
def test_stopped_crop_part_resumes_after_its_last_shard(images: Path, crops: Path, tmp_path: Path, number: int) -> None:
    output, notes = tmp_path / "out", [tmp_path / f"out/part-{part}-of-2.json" for part in range(2)]

    def part(index: int) -> list[str]:
        return [*crop_command(images, output)[:-1], str(notes[index]), "--part", f"{index}/2"]

    process = started(part(0))
    while process.poll() is None and not record_path(output, 0).exists():
        time.sleep(0.001)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == -number and not notes[0].exists()
    whole = check_nothing_is_half(output)
    assert 1 <= whole < SHARDS // 2
    assert f"{SHARDS // 2 - whole} shards written" in run(part(0)).stdout
    assert "3 shards written" in run(part(1)).stdout
    done = run([*crop_command(images, output), "--made", *map(str, notes)])
    assert "(0 written)" in done.stdout, done.stderr
    made = {name: data for name, data in bytes_of(output).items() if not name.startswith("part-")}
    assert made == bytes_of(crops)


def test_encode_killed_anywhere_ends_with_the_same_bytes(encode_program: Path, crops: Path, tmp_path: Path) -> None:
    def command(output: str) -> list[str]:
        return [warm_python(), str(encode_program), str(crops), str(tmp_path / output)]

    assert run(command("undisturbed")).returncode == 0
    kill_again_and_again(command("out"), tmp_path / "out", KILLS // 2)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "undisturbed")
    assert open_shards(tmp_path / "out", in_background=True).num_samples == 2000


@pytest.mark.parametrize(
    ("stage", "limit"), [("crop", 1_000), ("crop", 40_000), ("crop", 300_000), ("encode", 40_000), ("encode", 700_000)]
)
def test_full_disk_leaves_no_partial_shard(
    images: Path, encode_program: Path, crops: Path, tmp_path: Path, stage: str, limit: int
) -> None:
    output = tmp_path / "out"
    command = crop_command(images, output)
    if stage == "encode":
        command = [warm_python(), str(encode_program), str(crops), str(output)]

    def limited() -> None:  # no file may grow beyond the limit: writing fails as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    failed = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=limited,
        check=False,
    )
    assert failed.returncode == 1
    assert (
        "exceeds the limit of its size (ulimit -f)" in failed.stderr.splitlines()[-1]
        and "Traceback" not in failed.stderr
    )
    check_nothing_is_half(output)
    assert not (output / "manifest.json").exists()
    assert not list(output.glob("*.tmp"))
    done = run(command)
    assert done.returncode == 0, done.stderr
    if stage == "crop":
        assert bytes_of(output) == bytes_of(crops)
    else:
        assert open_shards(output, "all", in_background=True).num_samples == 2000


def test_processes_of_killed_crop_end_with_it(images: Path, tmp_path: Path) -> None:
    """They hold the write end of its output, which is closed when the last of them is gone."""
    command = [*crop_command(images, tmp_path), "--processes", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while not list(tmp_path.glob("shard-*")) and process.poll() is None:
            time.sleep(0.001)
        process.kill()
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
