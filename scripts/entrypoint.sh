#!/bin/sh
# Entrypoint of a container with the daemon inside: mounts the tree on $VFSD_MOUNTPOINT (/vfs), with the options of
# `vfsd mount` in $VFSD_MOUNT_OPTIONS. With a command: runs it with the tree as its /, confined by $VFSD_PROFILE (open),
# then unmounts and exits as it did. Without one: serves the tree to other containers until it is told to end.
# Needs --device /dev/fuse --cap-add SYS_ADMIN; docs/containers.md has more.
set -u
mountpoint=${VFSD_MOUNTPOINT:-/vfs}
mkdir -p "$mountpoint"

# In the background, so that this shell takes signals; it also reaps what others leave behind, as pid 1 must.
exec 3<&0
if [ $# -eq 0 ]; then
    # shellcheck disable=SC2086 # several options
    vfsd mount ${VFSD_MOUNT_OPTIONS-} --foreground "$mountpoint" &
else
    # shellcheck disable=SC2086
    vfsd mount ${VFSD_MOUNT_OPTIONS-} "$mountpoint" >&2 || exit
    vfsd run --name "$mountpoint" --profile "${VFSD_PROFILE:-open}" -- "$@" <&3 &
fi
child=$!
trap 'kill -TERM "$child"' TERM INT
while :; do
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break # a trapped signal ends the wait, not the command
done
if [ $# -gt 0 ]; then
    vfsd umount --force "$mountpoint" >&2
fi
exit $code
