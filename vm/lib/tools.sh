# shellcheck shell=bash
# Packages, the cache, and messages. Sourced.

# Failures in $(...) must not go unnoticed either.
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

# apt_get ARGS: quiet unless it fails; then prints apt's output.
apt_options=()
apt_get() {
    local words
    words=$(DEBIAN_FRONTEND=noninteractive apt-get -y -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 "${apt_options[@]}" "$@" 2>&1) || {
        printf '%s\n' "$words" >&2
        return 1
    }
}

# need COMMAND:PACKAGE ...: installs the packages whose command is missing; if it may not, prints
# what to install. A command with a slash is a file that must exist.
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
        # The package lists may be old or missing.
        { apt_get update && apt_get install --no-install-recommends "${missing[@]}"; } ||
            die "could not install ${missing[*]} (apt's output is above)"
    fi
}

# debian_mirror: prints where apt finds the release, not its security updates; nothing before apt's
# first update.
debian_mirror() {
    apt-get indextargets --format '$(ORIGIN) $(LABEL) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
        awk '$1 == "Debian" && $2 == "Debian" && !found { found = 1; print $3 }'
}

# of_suite SUITE FOLDER: apt_get from now on knows that suite of Debian's archive alone, from the
# mirror that apt is configured for. Its lists are in the folder FOLDER; apt's own are not changed.
of_suite() {
    local suite=$1 folder=$2 mirror
    mirror=$(debian_mirror)
    if [ -z "$mirror" ] && [ "$(id -u)" = 0 ]; then
        apt_get update || true
        mirror=$(debian_mirror)
    fi
    [ -n "$mirror" ] || die "apt knows no mirror of Debian. Please run: sudo apt-get update (a Debian archive is needed)"
    mkdir -p "$folder/lists/partial"
    printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n' "$mirror" "$suite" >"$folder/sources.list"
    chmod -R a+rX "$folder"
    apt_options=(-o "Dir::Etc::sourcelist=$folder/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$folder/lists"
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
    apt_get update || die "apt could not read $suite of $mirror (its output is above)"
}

# fetched PACKAGE...: downloads and unpacks packages; prints the folder that has them under `root`.
# The caller removes it.
fetched() {
    local work package
    work=$(mktemp -d "$(cache_folder)/.fetch-XXXXXX")
    # apt drops its privileges where it can, and must still be able to write there.
    chmod 755 "$work"
    if ! (cd "$work" && apt_get -o APT::Sandbox::User=root download "$@"); then
        rm -rf "$work"
        die "apt could not fetch $* (its output is above)"
    fi
    for package in "$work"/*.deb; do
        dpkg-deb -x "$package" "$work/root"
        rm "$package"
    done
    printf '%s\n' "$work"
}

# locked FILE COMMAND [ARGS]: serialises concurrent runs, so that only one fetches.
locked() {
    local lock=$1
    shift
    (
        flock 9
        "$@"
    ) 9>"$lock"
}
