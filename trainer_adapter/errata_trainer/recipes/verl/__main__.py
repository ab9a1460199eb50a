"""Entry of ``python -m errata_trainer.recipes.verl``."""

from .main import main

main()
