"""How pads pass ops, by family: one file each, with its table `TRAVELS`."""
