"""Property tests have no time limit of their own: a busy machine is not a failure. What tests of sandboxes share:

* `containers`: the container backend, on a Podman of the tests' own; skipped where this machine cannot have it. With
  TEST_IMAGE in the environment it is that image on the daemon that DOCKER_HOST names.
* `running`: `sandboxes.running` with each kind of local sandbox in turn; by `sandboxes.EVERY_WORKSPACE` with an
  overlaid workspace, too.
"""

import os
from functools import partial

import pytest
from hypothesis import settings

settings.register_profile("lightning-ray", deadline=None)
settings.load_profile("lightning-ray")


@pytest.fixture(scope="session")
def containers(tmp_path_factory):
    from lightning_ray.config import SandboxConfig
    from lightning_ray.sandbox import backend
    from tests import podman

    if given := os.environ.get("TEST_IMAGE"):
        yield backend.choose(SandboxConfig(backend="container", image=given))
        return
    try:
        with podman.service(tmp_path_factory.mktemp("podman")) as (host, image), pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", host)
            yield backend.choose(SandboxConfig(backend="container", image=image))
    except podman.Missing as missing:
        pytest.skip(f"no containers: {missing}")


@pytest.fixture(params=["bubblewrap", "container"])
def running(request, monkeypatch):
    from lightning_ray.sandbox import overlay
    from tests import sandboxes

    if request.param == "overlay":
        if overlay.refusal():
            pytest.skip(f"no overlay: {overlay.refusal()}")
        monkeypatch.setattr(overlay, "LARGE_BYTES", 1)
    if request.param != "container":
        return sandboxes.running
    return partial(sandboxes.running, make=request.getfixturevalue("containers").make)
