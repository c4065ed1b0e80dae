"""`python -m fivefold`, which is also how torchrun starts a rank: `torchrun ... -m fivefold train CONFIG.yaml`."""

from __future__ import annotations

from fivefold.cli.main import main

if __name__ == "__main__":
    main()
