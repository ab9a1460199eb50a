"""Rates between currencies."""

from decimal import Decimal

from .memo import memoized
from .money import rounded


class UnknownCurrency(LookupError):
    """The book has no rate of that currency."""


class RateBook:
    """Rates of currencies against a base currency, and by way of it against each other."""

    def __init__(self, base, rates={}):
        self.base = base
        self._rates = rates
        self._rates[base] = Decimal(1)

    @property
    def currencies(self):
        return sorted(self._rates)

    def set_rate(self, currency, rate):
        """Say how much of `currency` one unit of the base currency is worth."""
        rate = Decimal(rate)
        if rate <= 0:
            raise ValueError(f"the rate of {currency} has to be above 0, not {rate}")
        if currency == self.base:
            raise ValueError(f"{currency} is the base currency")
        self._rates[currency] = rate

    def drop(self, currency):
        """Forget a currency."""
        if currency == self.base or currency not in self._rates:
            raise UnknownCurrency(currency)
        del self._rates[currency]

    @memoized
    def rate(self, source, target):
        """Return how much of `target` one unit of `source` is worth."""
        for currency in (source, target):
            if currency not in self._rates:
                raise UnknownCurrency(currency)
        return self._rates[target] / self._rates[source]

    def convert(self, amount, source, target):
        """Return an amount in another currency, rounded to cents."""
        return rounded(Decimal(amount) * self.rate(source, target))
