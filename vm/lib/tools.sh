# shellcheck shell=bash
# What the machine is built with, and a line for a person. Sourced.

# What fails in $(...) must not go unnoticed either.
shopt -s inherit_errexit

say() { printf 'vm: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 125
}

cache_folder() {
    local folder=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/pinfold/vm
    mkdir -p "$folder"
    printf '%s\n' "$folder"
}

# apt_get ARGS: quiet unless it fails; then its own words are what helps.
apt_get() {
    local words
    words=$(DEBIAN_FRONTEND=noninteractive apt-get -y -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 "$@" 2>&1) || {
        printf '%s\n' "$words" >&2
        return 1
    }
}

# need COMMAND:PACKAGE ...: installs the packages whose command is missing; without the right to, says what to install.
# A command with a slash is a file that must be there.
need() {
    local pair command missing=()
    for pair in "$@"; do
        command=${pair%%:*}
        case $command in
            /*) [ -e "$command" ] || missing+=("${pair#*:}") ;;
            *) PATH=$PATH:/usr/sbin:/sbin command -v "$command" >/dev/null || missing+=("${pair#*:}") ;;
        esac
    done
    [ "${#missing[@]}" -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        die "missing. Please run: sudo apt-get install ${missing[*]}"
    fi
    say "installing ${missing[*]}"
    if ! apt_get install --no-install-recommends "${missing[@]}" 2>/dev/null; then
        # The lists may be old, or not there at all.
        { apt_get update && apt_get install --no-install-recommends "${missing[@]}"; } ||
            die "could not install ${missing[*]} (apt's words are above)"
    fi
}

# fetched PACKAGE...: apt's packages as files, unpacked together; prints the folder, in which they are under `root`.
# The caller removes it.
fetched() {
    local work package
    work=$(mktemp -d "$(cache_folder)/.fetch-XXXXXX")
    # The fetcher drops its rights where it can, and must still be able to write there.
    chmod 755 "$work"
    if ! (cd "$work" && apt_get -o APT::Sandbox::User=root download "$@"); then
        rm -rf "$work"
        die "apt could not fetch $* (its words are above)"
    fi
    for package in "$work"/*.deb; do
        dpkg-deb -x "$package" "$work/root"
        rm "$package"
    done
    printf '%s\n' "$work"
}

# locked FILE COMMAND [ARGS]: two runs side by side must not both fetch.
locked() {
    local lock=$1
    shift
    (
        flock 9
        "$@"
    ) 9>"$lock"
}
