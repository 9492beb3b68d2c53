"""Files of a sharded cache: publishing, the manifest, one shard written and checked."""
