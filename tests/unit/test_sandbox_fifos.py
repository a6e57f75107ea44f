"""Pipes through FIFOs, with a bash of this machine as the one inside: its workspace, its death, and none at all."""

import os
import subprocess
import time

import pytest

from lightning_ray.sandbox import pack
from lightning_ray.sandbox.base import SandboxError
from lightning_ray.sandbox.fifos import Fifos, redirections


@pytest.fixture
def fifos(tmp_path):
    made = Fifos(tmp_path / "pipes")
    yield made
    made.close()


@pytest.fixture
def archive(tmp_path):
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/big").write_bytes(bytes(range(256)) * 4000)  # more than a pipe holds
    descriptor = pack.open_pack(tmp_path / "workspace")
    yield descriptor
    os.close(descriptor)


def shell(tmp_path, line: str = "exec bash {}") -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", "-c", line.format(redirections(str(tmp_path / "pipes")))])


def test_a_shell_gets_a_workspace_and_private_pipes_and_ends_with_the_host(archive, tmp_path):
    fifos = Fifos(tmp_path / "pipes")
    with shell(tmp_path) as process:
        fifos.wait_ready(20, lambda: "")
        assert os.listdir(tmp_path / "pipes") == []
        (tmp_path / "out").mkdir()
        fifos.unpack(archive, str(tmp_path / "out"), 20)
        assert (tmp_path / "out/big").read_bytes() == (tmp_path / "workspace/big").read_bytes()
        fifos.close()
        assert process.wait(20) == 0


def test_what_tar_says_is_the_reason(fifos, archive, tmp_path):
    with shell(tmp_path) as process:
        fifos.wait_ready(20, lambda: "")
        with pytest.raises(SandboxError, match=r"does not fit.*no-such-place"):
            fifos.unpack(archive, str(tmp_path / "no-such-place"), 20)
        process.kill()


def test_a_shell_that_dies_is_no_workspace_that_does_not_fit(fifos, archive, tmp_path):
    with shell(tmp_path) as process:
        fifos.wait_ready(20, lambda: "")
        process.kill()
        process.wait()
        with pytest.raises(SandboxError, match="died while the workspace was unpacked"):
            fifos.unpack(archive, str(tmp_path), 20)


def test_a_shell_that_never_comes_up_is_an_error_at_once_where_the_reason_is_known(fifos):
    started = time.monotonic()
    with pytest.raises(SandboxError, match="it ended with status 9"):
        fifos.wait_ready(20, lambda: "it ended with status 9")
    assert time.monotonic() - started < 5
    with pytest.raises(SandboxError, match=r"no shell came up inside within 0\.3 s"):
        fifos.wait_ready(0.3, lambda: "")
