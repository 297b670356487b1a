"""Settings for every process of the control plane, read from the environment.

`controlplane.local.settings` derives those of a single machine from these.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured

from controlplane import logs
from controlplane.env import (
    database_from_url,
    env_bool,
    env_float,
    env_int,
    env_list,
    env_str,
)

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = env_str("SECRET_KEY")
DEBUG = env_bool("DEBUG", False)
#: Where people reach the pages; used in links inside incidents.
PUBLIC_URL = env_str("PUBLIC_URL", "http://127.0.0.1:8000")
_public = urlsplit(PUBLIC_URL)
if _public.scheme not in ("http", "https") or not _public.hostname:
    raise ImproperlyConfigured(
        f"PUBLIC_URL must be as https://drydock.example.org, not {PUBLIC_URL!r}"
    )
#: Further names by which web may be asked, besides PUBLIC_URL's and this machine's.
ALLOWED_HOSTS = [
    *env_list("ALLOWED_HOSTS", []),
    *(_public.hostname, "localhost", "127.0.0.1", "[::1]"),
]
#: Behind a proxy that speaks TLS, forms come from here although web itself is asked over HTTP.
CSRF_TRUSTED_ORIGINS = env_list("CSRF_TRUSTED_ORIGINS", [f"{_public.scheme}://{_public.netloc}"])
#: Where agents and runtimes reach ingest.
INGEST_URL = env_str("INGEST_URL", "http://127.0.0.1:8001")

DATABASES = {
    "default": database_from_url(
        env_str("DATABASE_URL", "postgresql:///drydock"), env_str("DATABASE_PASSWORD")
    )
}
#: The database gives up whatever web asks of it after this many seconds; 0: never. Other processes
#: share these settings and do not have this limit: `controlplane.wsgi` sets it.
WEB_STATEMENT_TIMEOUT_S = env_float("WEB_STATEMENT_TIMEOUT_S", 15, least=0)
REDIS_URL = env_str("REDIS_URL", "redis://127.0.0.1:6379/0")

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "django_htmx",
    "rest_framework",
    "drf_spectacular",
    "controlplane.accounts",
    "controlplane.fleet",
    "controlplane.health",
    "controlplane.jobs",
    "controlplane.incidents",
    "controlplane.ingest",
    "controlplane.dashboard",
    "controlplane.local",
    "workers",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "controlplane.middleware.RequestIdMiddleware",
    "controlplane.middleware.ContentSecurityPolicyMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "controlplane.middleware.NoNulMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

ROOT_URLCONF = "controlplane.urls"
WSGI_APPLICATION = "controlplane.wsgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": False,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
            "builtins": ["controlplane.dashboard.templatetags.drydock"],
            "libraries": {},
        },
    }
]

AUTH_USER_MODEL = "accounts.User"
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.Argon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "overview"
LOGOUT_REDIRECT_URL = "login"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_SECURE = env_bool("SECURE_COOKIES", PUBLIC_URL.startswith("https://"))
CSRF_COOKIE_SECURE = SESSION_COOKIE_SECURE
CSRF_COOKIE_HTTPONLY = False  # htmx sends it back as a header
CSRF_FAILURE_VIEW = "controlplane.rest.problems.csrf_failure"
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"

# --- REST -----------------------------------------------------------------------------------------

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "controlplane.accounts.authentication.TokenAuthentication",
        "controlplane.accounts.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_PARSER_CLASSES": ["controlplane.rest.media.JsonParser"],
    "DEFAULT_RENDERER_CLASSES": ["controlplane.rest.media.JsonRenderer"],
    "DEFAULT_SCHEMA_CLASS": "controlplane.rest.schema.ApiSchema",
    "DEFAULT_METADATA_CLASS": None,
    "EXCEPTION_HANDLER": "controlplane.rest.problems.exception_handler",
    "URL_FORMAT_OVERRIDE": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Drydock",
    "VERSION": "1",
    "OAS_VERSION": "3.1.1",
    "DESCRIPTION": "Read and steer GPU training fleets. The guide is in docs/api.md.",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "COMPONENT_NO_READ_ONLY_REQUIRED": True,  # `fields=` may leave out any of them
    "POSTPROCESSING_HOOKS": ["controlplane.rest.schema.complete"],
}

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

STATIC_URL = "/static/"
STATIC_ROOT: Path | None = BASE_DIR / "staticfiles"
STATICFILES_DIRS = [BASE_DIR / "static"]
WHITENOISE_USE_FINDERS = True

# --- Celery: the doorbell, never the memory -----------------------------------------------------

CELERY_BROKER_URL = REDIS_URL
CELERY_TASK_IGNORE_RESULT = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_timeout": 5, "socket_connect_timeout": 5}
CELERY_WORKER_HIJACK_ROOT_LOGGER = False

# --- How patient the automation is ----------------------------------------------------------------

#: A node beats this often, in seconds.
BEAT_INTERVAL_S = env_float("BEAT_INTERVAL_S", 10)
#: A node that has not been heard for this long is no longer believed alive, in seconds.
LEASE_S = env_float("LEASE_S", 30)
#: How long a worker may hold a playbook step before another may take it, in seconds. An order to a
#: node's BMC needs eight of them (`workers.power`), and what comes before it some more.
STEP_LEASE_S = env_float("STEP_LEASE_S", 60, least=15)
#: A node back from repair is watched for this long before it counts as healthy, in seconds.
SOAK_S = env_float("SOAK_S", 1800)
#: At most this many nodes of one cluster may be out for repair by automation at once.
BUDGET_NODES_PER_CLUSTER = env_int("BUDGET_NODES_PER_CLUSTER", 2)
#: And at most this many of one rack, of one job, and for one failure code.
BUDGET_NODES_PER_RACK = env_int("BUDGET_NODES_PER_RACK", 2)
BUDGET_NODES_PER_JOB = env_int("BUDGET_NODES_PER_JOB", 2)
BUDGET_NODES_PER_CODE = env_int("BUDGET_NODES_PER_CODE", 2)
#: A node that goes back to its vendor is away for weeks, and counts for this many seconds: so no
#: fault that looks like broken hardware, as a bad driver's, empties a cluster in a night.
RMA_COUNTS_S = env_float("RMA_COUNTS_S", 3600)
#: One failure code on this many nodes of a cluster within the window opens its breaker.
BREAKER_NODES = env_int("BREAKER_NODES", 5)
BREAKER_WINDOW_S = env_float("BREAKER_WINDOW_S", 600)
#: A share of a rack or cluster that goes quiet within the window is one incident of the shared
#: thing, and nothing disruptive is done to its members.
SILENCE_SHARE = env_float("SILENCE_SHARE", 0.5)
SILENCE_WINDOW_S = env_float("SILENCE_WINDOW_S", 30)
#: A site that stays silent this long asks for a person.
SILENCE_ASK_S = env_float("SILENCE_ASK_S", 900)
#: A node's sensors are kept for its charts this often, and for this long.
SAMPLE_INTERVAL_S = env_float("SAMPLE_INTERVAL_S", 60)
SAMPLE_KEEP_S = env_float("SAMPLE_KEEP_S", 7 * 86_400)
#: Corrected memory errors that come ever faster over this time take a node out before the fault.
ECC_DRIFT_WINDOW_S = env_float("ECC_DRIFT_WINDOW_S", 3600)
#: A card's other readings count once they have been so for this long.
READING_HOLD_S = env_float("READING_HOLD_S", 60)
#: A repair that waits for a job's next checkpoint goes on without it after this time.
CHECKPOINT_WAIT_S = env_float("CHECKPOINT_WAIT_S", 900)
#: The nodes are simulated: their pages offer to break them.
SIMULATED_FLEET = env_bool("SIMULATED_FLEET", False)
#: At most this many attempts at one rung of the repair ladder per card and 24 hours.
REPAIR_ATTEMPTS_PER_DAY = env_int("REPAIR_ATTEMPTS_PER_DAY", 2)
#: An incident's cause is looked for at most this long after the lease that could explain it.
CAUSE_WAIT_S = env_float("CAUSE_WAIT_S", 10)
#: A started replica must be training again within this many seconds.
REPLICA_START_DEADLINE_S = env_float("REPLICA_START_DEADLINE_S", 600)
#: The vendor's field diagnostic of one card must end within this many seconds.
FIELD_DIAGNOSTIC_S = env_float("FIELD_DIAGNOSTIC_S", 6 * 3600)
#: A power-cycled node must beat again within this many seconds.
BOOT_DEADLINE_S = env_float("BOOT_DEADLINE_S", 1200)

if LEASE_S < 2 * BEAT_INTERVAL_S:
    raise ImproperlyConfigured(
        "LEASE_S must be at least twice BEAT_INTERVAL_S: one beat may be lost"
    )

# --- Logs: an event name and fields ---------------------------------------------------------------

#: Whether each line is a JSON object; otherwise text for a terminal.
LOG_JSON = env_bool("LOG_JSON", True)
LOG_LEVEL = env_str("LOG_LEVEL", "INFO").upper()
if LOG_LEVEL not in logs.LEVELS:
    raise ImproperlyConfigured(f"LOG_LEVEL must be one of {', '.join(logs.LEVELS)}")
LOGGING = logs.configure(json_lines=LOG_JSON, level=LOG_LEVEL)

# --- Metrics --------------------------------------------------------------------------------------

#: Addresses or networks from which /metrics may be read without a token.
METRICS_ALLOW = env_list("METRICS_ALLOW", ["127.0.0.0/8", "::1"])
#: With this bearer token /metrics may be read from anywhere.
METRICS_TOKEN = env_str("METRICS_TOKEN")
#: host:port of the keeper's own /metrics, /healthz and /readyz; empty: it listens nowhere.
KEEPER_METRICS_ADDRESS = env_str("KEEPER_METRICS_ADDRESS")
