# Runs a command with a /tmp and /dev/shm of its own; only this repository is seen in both. After `unshare -m`.
repo=$(cd "$(dirname "$0")/.." && pwd)
was=$(pwd)
mount -t tmpfs fastddp /mnt || exit 1
case $repo in /tmp/*)
    mkdir -p "/mnt${repo#/tmp}"
    mount --bind "$repo" "/mnt${repo#/tmp}";;
esac
mount --move /mnt /tmp
mount -t tmpfs fastddp /dev/shm
cd "$was" 2>/dev/null || cd /
exec "$@"
