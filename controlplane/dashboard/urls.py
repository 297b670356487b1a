from __future__ import annotations

from django.urls import path

from controlplane.dashboard import (
    clusters,
    failures,
    jobs,
    nodes,
    playbooks,
    repairs,
    search,
    views,
)

urlpatterns = [
    path("", views.overview, name="overview"),
    path("automation", views.automation, name="automation"),
    path("healthz", views.healthz, name="healthz"),
    path("readyz", views.readyz, name="readyz"),
    path("search", search.search, name="search"),
    path("clusters", clusters.clusters, name="clusters"),
    path("clusters/<str:cluster_id>", clusters.cluster, name="cluster"),
    path("clusters/<str:cluster_id>/map", clusters.cluster_map, name="cluster-map"),
    path("clusters/<str:cluster_id>/nodes/<str:name>", clusters.node_by_name, name="node-by-name"),
    path("nodes/<str:node_id>", nodes.node, name="node"),
    path("nodes/<str:node_id>/samples", nodes.samples, name="node-samples"),
    path("nodes/<str:node_id>/order", nodes.order, name="node-order"),
    path("nodes/<str:node_id>/hold", nodes.hold, name="node-hold"),
    path("nodes/<str:node_id>/release", nodes.release, name="node-release"),
    path("nodes/<str:node_id>/spare", nodes.spare, name="node-spare"),
    path("nodes/<str:node_id>/unspare", nodes.unspare, name="node-unspare"),
    path("nodes/<str:node_id>/revoke-key", nodes.revoke_key, name="node-revoke-key"),
    path("nodes/<str:node_id>/maintenance", nodes.maintenance, name="node-maintenance"),
    path("jobs/<str:job_id>", jobs.job, name="job"),
    path("jobs/<str:job_id>/move", jobs.move, name="job-move"),
    path("jobs/<str:job_id>/start", jobs.start, name="job-start"),
    path("jobs/<str:job_id>/checkpoint", jobs.checkpoint, name="job-checkpoint"),
    path("failures", failures.failures, name="failures"),
    path("failures/lemons", failures.lemon_nodes, name="failures-lemons"),
    path("failures/rule", failures.rule, name="failures-rule"),
    path("repairs", repairs.repairs, name="repairs"),
    path("rma/<str:case_id>", repairs.case, name="rma-case"),
    path("rma/<str:case_id>/bundle.json", repairs.bundle, name="rma-bundle"),
    path("rma/<str:case_id>/send", repairs.send, name="rma-send"),
    path("rma/<str:case_id>/close", repairs.close, name="rma-close"),
    path("playbooks", playbooks.playbooks, name="automation-page"),
    path("playbooks/<str:cluster_id>/mode", playbooks.set_mode, name="playbook-mode"),
    path("playbooks/<str:cluster_id>/limit", playbooks.set_limit, name="budget-limit"),
    path("breakers/<str:breaker_id>/close", playbooks.close_breaker, name="breaker-close"),
    path(
        "clusters/<str:cluster_id>/maintenance",
        playbooks.open_maintenance,
        name="maintenance-open",
    ),
    path(
        "maintenance/<str:window_id>/close", playbooks.close_maintenance, name="maintenance-close"
    ),
]
