"""The keys of prime-rl's files and flags, which each program reads as its own; programs hand them to the loader."""

from meshrl.prime_rl.spellings import PrimeRLKeys

__all__ = ["PrimeRLKeys"]
