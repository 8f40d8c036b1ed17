"""The REST resources: one file each, router(console, user) -> APIRouter, and its word in ROUTES.

health and metrics are not in it: the host includes them with what else they need.
"""

ROUTES = (
    "doctor",
    "events",
    "jobs",
    "licences",
    "measurements",
    "media",
    "parity",
    "plans",
    "runs",
    "telemetry",
)
