from __future__ import annotations

from django.urls import path

from controlplane.accounts import views

urlpatterns = [
    path("login", views.login, name="login"),
    path("logout", views.logout, name="logout"),
]
