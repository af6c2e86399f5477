#!/bin/sh
# Installs jumbo from this folder for one user, without root: ./install.sh [--uninstall] [--prefix DIR]
#
# DIR is ~/.local. All files are copied beside their place first, and then renamed: a full disk changes nothing, and
# programs that run keep the library that they have mapped. Libraries of other versions stay, since children of programs
# that run load them by name; --uninstall removes them too.
set -eu

prefix=${HOME:+$HOME/.local}
uninstall=
while [ $# -gt 0 ]; do
    case $1 in
    --uninstall) uninstall=1 ;;
    --prefix) prefix=${2:?--prefix needs a folder}; shift ;;
    --prefix=*) prefix=${1#*=} ;;
    *) sed -n '2s/^# //p' "$0"; [ "$1" = --help ] && exit 0 || exit 2 ;;
    esac
    shift
done
[ "$prefix" ] || { echo "HOME is not set, and no --prefix given" >&2; exit 2; }
case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
list=lib/jumbo/files

# Removes the files named on stdin, and folders that are empty then.
remove() {
    while read -r file; do
        rm -f "$prefix/$file"
        folder=$(dirname "$file")
        while [ "$folder" != . ] && rmdir "$prefix/$folder" 2>/dev/null; do
            folder=$(dirname "$folder")
        done
    done
    rmdir "$prefix" 2>/dev/null || :
}

if [ "$uninstall" ]; then
    [ -f "$prefix/$list" ] || { echo "jumbo is not installed in $prefix" >&2; exit 1; }
    files=$(cat "$prefix/$list")
    libraries=$(cd "$prefix" && find lib/jumbo -name 'libjumbo_preload.so*')
    printf '%s\n' "$files" "$libraries" "$list" | remove
    echo "jumbo is no longer in $prefix"
    exit
fi

cd "$(dirname "$0")"
new=.jumbo-new.$$
# The command last: until then the old one is whole.
files=$(find lib share ! -type d | sort; echo bin/jumbo)
undo() {
    status=$?
    trap - EXIT
    # With the new folders, which are empty then.
    printf '%s\n' "$files" "$list" | sed "s/\$/$new/" | remove
    echo "jumbo was not installed: $prefix is as it was" >&2
    exit "$status"
}
trap undo EXIT
trap 'exit 1' HUP INT TERM
for file in $files; do
    mkdir -p "$prefix/$(dirname "$file")"
    cp -pP "$file" "$prefix/$file$new"
done
{ [ ! -f "$prefix/$list" ] || cat "$prefix/$list"; printf '%s\n' "$files"; } | sort -u >"$prefix/$list$new"
trap - EXIT HUP INT TERM
for file in $list $files; do
    mv -f "$prefix/$file$new" "$prefix/$file"
done
echo "jumbo is in $prefix/bin"
case :${PATH:-}: in *:"$prefix/bin":*) ;; *) echo "hint: that is not in PATH: $prefix/bin/jumbo" ;; esac
