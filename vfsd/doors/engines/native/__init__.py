"""The FUSE kernel protocol spoken from Python: ``protocol`` (sans-IO), ``transport`` (mount and device), ``engine``."""
