from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0006_command_lookups'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='command',
            index=models.Index(condition=models.Q(('finished_at__isnull', False), models.Q(('requester__startswith', 'end/'), _negated=True)), fields=['finished_at'], name='command_by_end'),
        ),
    ]
