"""The keys of prime-rl's files and flags, which every program reads as its own."""

from meshrl.prime_rl.spellings import PrimeRLKeys

__all__ = ["PrimeRLKeys"]
