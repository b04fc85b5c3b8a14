"""Storage, clocks, commits and wake-ups: what the core decides is done here."""

#: Lets `actors` tell this package from another one of the same plain name.
__mainspring__ = True
