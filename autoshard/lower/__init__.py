"""Plan -> schedule of one rank -> local FX graphs with explicit collectives."""
