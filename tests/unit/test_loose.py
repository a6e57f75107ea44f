"""What is passed loosely arrives as it is."""

import pickle

from ray import cloudpickle

from lightning_ray.ray_session import Loose


def test_a_loose_value_arrives_as_itself():
    value = [{"handles": (1, 2)}, None]
    for library in (pickle, cloudpickle):
        assert library.loads(library.dumps({"generators": Loose(value)})) == {"generators": value}
