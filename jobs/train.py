"""The same as `lightning-ray train`, for `ray job submit --working-dir . -- python jobs/train.py CONFIG.yaml
--run.dir DIR`."""

import sys

from lightning_ray.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
