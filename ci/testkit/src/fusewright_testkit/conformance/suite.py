# ruff: noqa: F401, F403
"""All tests of the suite, for a module that has PACKAGE, OPERATIONS and FORMS to import."""

from .autocast import *
from .autograd import *
from .bits import *
from .cases import pytest_generate_tests
from .compilers import *
from .gpu import *
from .input import *
from .package import *
from .registration import *
from .transforms import *
