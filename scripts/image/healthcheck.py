#!/usr/bin/env python3
"""End with 0 if the server of this container says that it is healthy.

That says nothing about its answers: scripts/stack smoke asks for those.
"""

import http.client
import os
import sys
import urllib.request

URL = os.environ.get("MI300X_HEALTH_URL", "http://127.0.0.1:8000/health")

# A proxy is for other machines than this one.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    with opener.open(URL, timeout=8) as answer:
        sys.exit(0 if answer.status == 200 else 1)
except (OSError, ValueError, http.client.HTTPException) as error:
    sys.exit(f"{URL}: {error}")
