#!/usr/bin/env python3
"""End with 0 if the server of this container says that it is healthy.

That says nothing about its answers: scripts/stack smoke asks for those.
"""

import os
import sys
import urllib.request

URL = os.environ.get("MI300X_HEALTH_URL", "http://127.0.0.1:8000/health")

try:
    with urllib.request.urlopen(URL, timeout=8) as answer:
        sys.exit(0 if answer.status == 200 else 1)
except OSError as error:
    sys.exit(f"{URL}: {error}")
