"""What jaxtyping's import hook checks calls with: beartype, an int being good enough for a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
