"""Which runs to make: presets as data, sweeps that train what is missing."""
