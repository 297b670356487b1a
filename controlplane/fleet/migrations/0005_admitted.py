from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor


def read_the_trail(apps: Apps, _editor: BaseDatabaseSchemaEditor) -> None:
    """A node was admitted when its audit events first tell that it became available."""
    events = apps.get_model("accounts", "AuditEvent").objects.filter(
        object_type="node",
        object_id=models.OuterRef("pk"),
        verb="node.transition",
        after__state="available",
    )
    first = events.order_by("id").values("at")[:1]
    apps.get_model("fleet", "Node").objects.update(admitted_at=models.Subquery(first))


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0003_audit_by_verb'),
        ('fleet', '0004_node_switch'),
    ]

    operations = [
        migrations.AddField(
            model_name='node',
            name='admitted_at',
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.RunPython(read_the_trail, migrations.RunPython.noop),
    ]
