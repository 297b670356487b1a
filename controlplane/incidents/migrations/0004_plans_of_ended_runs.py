from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor


def void_plans_of_ended_runs(apps: Apps, _editor: BaseDatabaseSchemaEditor) -> None:
    """A plan that still waits to be signed became void when its run ended."""
    runs = apps.get_model("incidents", "PlaybookRun").objects.filter(pk=models.OuterRef("run"))
    apps.get_model("incidents", "Approval").objects.filter(
        state="waiting", run__state__in=["succeeded", "failed", "cancelled"]
    ).update(state="void", decided_at=models.Subquery(runs.values("finished_at")))


class Migration(migrations.Migration):

    dependencies = [
        ('incidents', '0003_latest'),
    ]

    operations = [
        migrations.RunPython(void_plans_of_ended_runs, migrations.RunPython.noop),
    ]
