"""A container daemon for tests: Podman's API service with a store of its own and an image made by `make_image.sh`,
both kept in the cache directory. `Missing` says why this machine cannot have it.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

SCRIPT = Path(__file__).with_name("make_image.sh")
CACHE = Path("~/.cache/lightning_ray/test_containers").expanduser()
IMAGE = "lightning-ray-test"
VARIABLE = "IN_IMAGE"
"""An environment variable of the image."""
CONFIG = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "RUNTIME"
cgroup_manager = "cgroupfs"
"""
"""Without systemd as process 1, and with runc where there is one: cgroups of version 1 and 2 at once are too much for
Debian's crun."""


registry = ""
"""HOST:PORT from which the running service pulls without TLS, for a test's own registry."""


class Missing(Exception):
    """What is not there."""


@contextlib.contextmanager
def service(directory: Path, *also: str) -> Iterator[tuple[str, str]]:
    """DOCKER_HOST of a service that runs meanwhile, and an image in the lower-case name:tag form. Needs some programs,
    and `also` these; Debian's packages have the same names."""
    if os.geteuid() != 0:
        raise Missing("these tests start Podman as root")
    runtime = next(filter(shutil.which, ("runc", "crun")), "runc")
    if lacking := [name for name in ("podman", "conmon", runtime, "debootstrap", *also) if not shutil.which(name)]:
        raise Missing(f"no {', '.join(lacking)} on this machine. As root: apt-get install {' '.join(lacking)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    global registry
    with socket.create_server(("127.0.0.1", 0)) as free:
        registry = f"127.0.0.1:{free.getsockname()[1]}"
    registries = directory / "registries.conf"
    registries.write_text(f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n')
    config = CACHE / "containers.conf"
    config.write_text(CONFIG.replace("RUNTIME", runtime))
    podman = ["podman", "--root", str(CACHE / "store"), "--runroot", str(CACHE / "run")]
    environment = {**os.environ, "CONTAINERS_CONF": str(config), "CONTAINERS_REGISTRIES_CONF": str(registries)}
    image = f"{IMAGE}:{hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:12]}"
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _image(podman, environment, image)
    address = directory / "podman.sock"
    command = [*podman, "system", "service", "--time=0", f"unix://{address}"]
    process = subprocess.Popen(command, env=environment, cwd=directory,  # where conmon leaves its notes
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while not address.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise Missing(f"podman system service does not start: {process.stderr.read()[-500:]}")
            time.sleep(0.05)
        yield f"unix://{address}", image
    finally:
        process.terminate()
        process.communicate()


def _image(podman: list[str], environment: dict[str, str], image: str) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    if run(*podman, "image", "exists", image).returncode == 0:
        return
    archive = CACHE / "image.tar"
    try:
        made = run(str(SCRIPT), str(archive))
        if made.returncode:
            raise Missing(f"no image can be made: {made.stderr.strip()[-500:]}")
        imported = run(*podman, "import", "--change", f"ENV {VARIABLE}=yes", str(archive), image)
        if imported.returncode:
            raise Missing(f"podman cannot import the image: {imported.stderr.strip()[-500:]}")
    finally:
        archive.unlink(missing_ok=True)
