import sys
from pathlib import Path

import heldin._flow

sys.path.insert(0, str(Path(__file__).parent))
heldin._flow.DEBUG = True
