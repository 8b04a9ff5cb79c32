"""What every package needs and none owns: how an op is registered, how a launch is planned, which
backend serves a call, what is checked of arguments.

One text, ``packages/_core``, which every package carries as its subpackage ``_core`` (in the
repository a symbolic link, in a wheel real files). Nothing here is public, and importing it needs
torch alone.
"""
