# Read by bash before a training script, so that bash expands the script without running it.
#
# Python starts this file with PATH set to a folder of links to harmless programs, and bash becomes a
# restricted shell below: no command with a slash, no output to a file, no network, no other PATH. The
# builtins that change files, processes or this setup are disabled. Every other command is unknown to
# bash, which calls command_not_found_handle with the expanded words, and they are sent to Python.
# The DEBUG trap sends commands with a slash, which a restricted shell does not look up.
shopt -s extdebug expand_aliases extglob
set -T +h
exec 7<&0 8>&1 </dev/null 9>/dev/null >&9 2>&9
for __limit in -f:0 -c:0 -t:5 -v:2000000 -u:4096; do ulimit "${__limit%:*}" "${__limit#*:}"; done

__send() { # a piece of a record; shorter than a pipe's buffer, so that processes do not mix
    printf '%s %s\0' "$BASHPID" "$1" >&8
}
__record() { # send the words of a command that may start a training, and its environment
    local __word || return
    case "$*" in
        *.py*|*' -m '*|*-c\ *|*.sh*|*.slurm*|*.sbatch*) ;;
        *'megatron sft '*|*'megatron pt '*|*'megatron rlhf '*) ;; # of ms-swift
        *) return ;;
    esac
    __send B
    for __word; do __send "W$__word"; done
    for __word in $(compgen -e); do __send "E$__word=${!__word}"; done
    __send Z
}
__unknown() { # stands for the output of a command that was not executed: one word, without effect
    local __words="$*" || return
    if [[ $__words == *model_args_utils.py\ * ]]; then # its output is evaluated in Python
        __send O
        for __words; do __send "W$__words"; done
        __send Z
        IFS= read -r __copy <&7
        if [[ -n $__copy ]]; then printf '%s\n' "$__copy"; return; fi
        __words="$*"
    fi
    # Nothing that `eval` would read as a part of the shell's language.
    printf '@{%s}\n' "${__words//[^A-Za-z0-9_.\/:=,+%-]/$'\xc2\xa0'}"
}
command_not_found_handle() {
    __record "$@"
    __unknown "$@"
}
__debug() {
    local __text=$BASH_COMMAND __part || return 1
    ((BASH_SUBSHELL > 9)) && return 1
    case $__text in
        __*|'[['*|'(('*|'for '*|'case '*|'select '*) return 0 ;;
    esac
    [[ $__text =~ ^[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?= ]] && return 0
    # bash itself expands the words of other commands, without a slash and output to a file.
    [[ ${__text%%[[:space:]]*} == *[/\$\`\"\'\\~]* || $__text =~ $__output ]] || return 0
    # No trap checks a substitution within this trap: none is expanded here.
    while [[ $__text =~ $__redirection ]]; do __text=${__text%"${BASH_REMATCH[0]}"}; done
    while [[ $__text =~ \$\(([^\(\)]*)\)|\`([^\`]*)\` ]]; do
        __part=${BASH_REMATCH[1]}${BASH_REMATCH[2]}
        __text=${__text/"${BASH_REMATCH[0]}"/@\\{${__part//[^A-Za-z0-9_.-]/_}\\}}
    done
    local -a __words=() || return 1
    [[ $__text == *'$('[!\(]* || $__text == *[\<\>]\(* ]] || eval "__words=( $__text )"
    [[ ${__words[0]} == */* || ( $BASH_COMMAND =~ $__output && -z $(type -t "${__words[0]}") ) ]] ||
        return 0
    __record "${__words[@]}"
    __unknown "${__words[@]}"
    return 1
}
__target=$'("[^"]*"|\'[^\']*\'|\\$\\([^()]*\\)|[^][:space:]"\'()<>])+'
readonly __redirection=$'[[:space:]][0-9]*(&>>?|>>?&?|>\\||<|<&|<<<)[[:space:]]?'"$__target\$"
readonly __output=$'[[:space:]][0-9]*(&>>?|>>?|>\\|)[[:space:]]'"$__target"$'([[:space:]][0-9]*>&[0-9])*$'

# Commands that scripts use to find numbers and folders; nothing else changes for them.
exit() { :; }
set() { :; }
shopt() { :; }
trap() { :; }
wait() { :; }
hostname() { echo localhost; }
date() { local __format=+%c || return; [[ $1 != +* ]] || __format=$1; printf "%(${__format#+})T\n"; }
pwd() { printf '%s\n' "$PWD"; }
cd() {
    while [[ $1 == -* ]]; do shift; done
    [[ $1 == /* ]] && PWD=$(realpath -m -- "$1") || PWD=$(realpath -m -- "$PWD/${1:-.}")
}
pushd() { cd "$@"; }
scontrol() { # the nodes of the job by name
    local __node || return
    [[ "$1 $SLURM_NNODES" =~ ^show\ [0-9]+$ ]] || { __unknown scontrol "$@"; return; }
    for ((__node = 0; __node < SLURM_NNODES; __node++)); do echo "node$__node"; done
}
wc() { # the number of words of an unknown output is unknown
    local __text=$(cat "${@:2}") || return
    if [[ $__text == *'@{'* ]]; then echo "$__text"; return; fi
    printf '%s' "${__text:+$__text$'\n'}" | command wc "$1"
}
sed() { # only substitutions of plain text: sed itself can execute commands and write files
    local __text __rules=$1 __rule=' *s/([A-Za-z0-9_:-]+)/([A-Za-z0-9_.:-]*)/(g?) *(;|$)' || return
    [[ $# == 1 && $1 =~ ^($__rule)+$ ]] || { __unknown sed "$@"; return; }
    __text=$(cat)
    while [[ $__rules =~ ^$__rule ]]; do
        __rules=${__rules#"${BASH_REMATCH[0]}"}
        if [[ -n ${BASH_REMATCH[3]} ]]; then
            __text=${__text//"${BASH_REMATCH[1]}"/"${BASH_REMATCH[2]}"}
        else
            __text=${__text/"${BASH_REMATCH[1]}"/"${BASH_REMATCH[2]}"}
        fi
    done
    printf '%s\n' "$__text"
}
__script() { # send a script that is written to a file, which later commands start
    local __line || return
    __send "F$1"
    while IFS= read -r __line || [[ -n $__line ]]; do __send "W$__line"; done
    __send Z
}
__source() { # ask Python for a copy of a file, under a name without a slash
    __send "S$PWD"
    __send "W$1"
    __send Z
    IFS= read -r __copy <&7
}
__finish() { # send variables with flags, for scripts that leave the command to another one
    local __name __all || return
    for __name in $(compgen -v); do
        __all="$__name[@]"
        case $__name:${!__all} in
            __*|BASH_*) ;;
            *--[a-z]*) __send "A$__name"; for __all in "${!__all}"; do __send "W$__all"; done; __send Z ;;
        esac
    done
}

__parameters=("$@")
alias sleep='break; :' # a loop that waits for another program would not end
alias source='command . __source_file' .='command . __source_file'
command trap __finish EXIT
command trap __debug DEBUG
readonly -f $(compgen -A function)
readonly LD_PRELOAD= LD_LIBRARY_PATH= LD_AUDIT= LD_DEBUG= LD_DEBUG_OUTPUT= LD_PROFILE= \
    LD_PROFILE_OUTPUT= GCONV_PATH= LOCPATH= BC_ENV_ARGS= BASH_SUBSHELL FUNCNEST=40 __parameters
command set -r
enable -n alias unalias bg bind cd disown exec exit fc fg hash history jobs kill logout popd pushd \
    set shopt suspend trap ulimit umask wait builtin enable
