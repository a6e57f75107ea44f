"""Property tests have no time limit of their own: a busy machine is not a failure."""

from hypothesis import settings

settings.register_profile("lightning-ray", deadline=None)
settings.load_profile("lightning-ray")
