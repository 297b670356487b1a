from __future__ import annotations

from django.urls import path

from controlplane.accounts.views import Login, Logout

urlpatterns = [
    path("login", Login.as_view(), name="login"),
    path("logout", Logout.as_view(), name="logout"),
]
