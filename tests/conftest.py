"""Property tests: the gate draws the same examples every time; `make campaign` draws new and many ones."""

from hypothesis import settings

settings.register_profile("gate", derandomize=True, deadline=None)
settings.register_profile("campaign", max_examples=3000, deadline=None)
settings.load_profile("gate")
