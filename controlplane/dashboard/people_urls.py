from __future__ import annotations

from django.urls import path

from controlplane.dashboard import audit, tokens, users

urlpatterns = [
    path("audit", audit.audit, name="audit"),
    path("users", users.users, name="users"),
    path("users/create", users.create, name="user-create"),
    path("users/grant", users.grant, name="user-grant"),
    path("users/<int:user_id>/revoke", users.revoke, name="user-revoke"),
    path("users/<int:user_id>/switch", users.switch, name="user-switch"),
    path("users/<int:user_id>/password", users.reset_password, name="user-password"),
    path("tokens", tokens.tokens, name="tokens"),
    path("tokens/create", tokens.create, name="token-create"),
    path("tokens/<str:token_id>/revoke", tokens.revoke, name="token-revoke"),
]
