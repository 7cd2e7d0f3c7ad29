"""Scripts that try to run a program, write, connect or survive: bash must only expand them."""

# ruff: noqa: E501
import os
import socket
import subprocess
from pathlib import Path

import pytest

from megatron_vshape.rehearsal import shell_script

# A reader with a fault executes these scripts: they harm only the test's folder and process.
PORT, PROCESS = "VSHAPE_TEST_PORT", "VSHAPE_TEST_PROCESS"
MARK = "VSHAPE_TEST_MARK"

SCRIPTS = r"""
rm -rf victim; rm victim/file; /bin/rm victim/file; \rm victim/file; command rm victim/file
echo x > victim/file; : > victim/file; > victim/file; echo x >> victim/file; echo x >| victim/file
{ echo x; } > victim/file; (echo x) > victim/file; for i in 1; do echo x; done > victim/file
if true; then echo x; fi &> victim/file; f() { echo x; } > victim/file; f
f() { echo x > victim/file; }; f; f > victim/new
x=$(echo x > victim/file); y=`rm victim/file`; z=${x:-$(./evil)}; w=$((a[$(./evil)]))
eval 'rm victim/file'; eval "echo x > victim/file"; eval eval ./evil
cat <(./evil) <(rm victim/file) <(echo x > victim/file); echo x > >(cat > victim/file)
exec 3> victim/file; echo x >&3; exec 3<> victim/file; exec ./evil; exec > victim/file
f=victim/file; echo x >&$f; echo x > "$f"; echo x 1<> $f; cat <<< x > $f
seq() { ./evil; }; cat() { rm victim/file; }; echo() { ./evil; }; seq 1; cat; echo x
sed -i s/a/b/ victim/file; sed 's/a/b/w victim/new' victim/file; echo x | sed '1e ./evil'
echo x | sed 's/x/./evil/e'; echo x | sed 's/x/y/w victim/new'; echo x | sed "s/x/$(./evil)/"; x='$(./evil)'; echo x | sed "s/x/${x}/g"; command sed -i s/a/b/ victim/file
awk 'BEGIN { system("./evil") }'; awk 'BEGIN { print "x" > "victim/file" }'
sort -o victim/file /etc/passwd; tee victim/file < /etc/passwd; dd if=/etc/passwd of=victim/file
curl localhost:$VSHAPE_TEST_PORT; nc localhost $VSHAPE_TEST_PORT; wget localhost
cat < /dev/tcp/127.0.0.1/$VSHAPE_TEST_PORT; d=/dev/t; cat < ${d}cp/127.0.0.1/$VSHAPE_TEST_PORT
while read -r x; do :; done < /dev/tcp/127.0.0.1/$VSHAPE_TEST_PORT; exec 3<>/dev/tcp/127.0.0.1/$VSHAPE_TEST_PORT
:(){ :|:& };:
f() { f & f & }; f; b='eval "$b" & eval "$b" &'; eval "$b"
while :; do :; done
while true; do sleep 100 & done
(while :; do :; done) & disown; nohup cat /dev/zero & setsid cat /dev/zero &
x=$(tr '\0' x < /dev/zero); cat /dev/zero | tr '\0' x >&8
alias echo='./evil'; alias cd='rm victim/file'; alias __debug=true __record=./evil; echo x; cd /
shopt -u extdebug; set +T; trap - DEBUG; trap './evil' EXIT; trap 'echo x > victim/file' 0; ./evil
unset -f __debug command_not_found_handle set; __debug() { return 0; }; ./evil; rm victim/file
readonly __text=: __words=:; declare -r __part=1; ./evil; rm victim/file
enable -a; enable kill exec; builtin exec ./evil; command exec ./evil; enable -f ./evil.so evil
builtin trap - DEBUG; builtin set +r; command set +r; set +o restricted; ./evil; /bin/touch victim/new
cat > run.sh <<< 'touch victim/new; ./evil; rm -rf victim'; bash run.sh; . ./run.sh; sh ./run.sh
echo './evil; touch victim/new' >> "$PWD/victim/run.sh"; bash "$PWD/victim/run.sh"; printf x > evil.sh
PATH=.:/bin:$PATH; export PATH=.:/bin; evil; touch victim/new; declare -x PATH=.; P=PATH; eval "$P=."; evil
hash -p ./evil evil; evil; BASH_CMDS[ok]=/bin/touch; ok victim/new; command -p touch victim/new
export LD_PRELOAD=./evil.so; LD_PRELOAD=./evil.so seq 1; p=LD_PRELOAD; export $p=./evil.so; seq 1; declare -x "$p=./evil.so"; nl x
p=LD_DEBUG; export $p=all; export ${p}_OUTPUT=victim/new; seq 1; BASH_ENV=./evil; ENV=./evil; bash -c :; sh -c ./evil
f() { ./evil; }; export -f f; bash -c f; bash -c "$(cat evil)"; xargs -I{} ./evil < victim/file; env ./evil; find . -exec ./evil \;
"./evil" "$(./evil)"; $(echo ./evil); e=./evil; $e; ${e} x; "$e"; ~+/evil; ./ev*; ./$(echo evil | ./evil)
history -w victim/new; fc -s; kill -9 $VSHAPE_TEST_PROCESS; command kill $VSHAPE_TEST_PROCESS; suspend; ulimit -f unlimited; umask 0
source ./evil.sh; . evil.sh; source <(echo ./evil); source /dev/stdin <<< 'rm victim/file'; command . ./evil.sh
coproc ./evil; coproc rm victim/file; time ./evil; ! ./evil; ./evil | ./evil; ./evil && rm victim/file || ./evil
mapfile -c 1 -C './evil' x < /etc/passwd; compgen -C ./evil; complete -C ./evil x; printf -v 'a[$(./evil)]' x
x='$(./evil)'; echo "${x@P}"; ./none "${x@P}" $((a[$(./evil)])) `./evil`; declare -n r='a[$(./evil)]'; r=1
python -c 'open("victim/new", "w")'; perl -e 'unlink "victim/file"'; ruby -e x; bc <<< 'x'; expr 1 : x
bash inner.sh; srun bash -c "rm victim/file; ./evil"; docker exec x sh -c './evil' run.py; ssh host "./evil --x run.py > victim/new"
printf '1 S/etc\0' >&8; printf '1 W/etc/passwd\0001 Z\0' >&8; printf '%s B\0%s Wx.py\0' 1 >&8; read -r x <&7; cat <&7
""".strip().splitlines()

INNER = "rm victim/file; ./evil; echo x > victim/file\n"
EVIL = "#!/bin/sh\n: > {folder}/executed\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file to destroy, and with programs that leave a file if they are executed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setattr(shell_script, "SECONDS", 1.5)
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("kept\n")
    (tmp_path / "inner.sh").write_text(INNER)
    for name in ("evil", "evil.sh", "evil.so"):
        (tmp_path / name).write_text(EVIL.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    return tmp_path


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """All files with their text and the time of their last change."""
    return {
        str(path): (path.read_text() if path.is_file() else "", path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def processes(mark: str) -> list[str]:
    """The processes whose environment has the mark, apart from this one."""
    marked = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment and int(process.name) != os.getpid():
            marked.append((process / "comm").read_text())
    return marked


def test_there_are_enough_scripts() -> None:
    assert len(SCRIPTS) >= 30


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_is_executed_written_or_left_running(
    folder: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each command on a line of its own as well: an error ends the line.
    commands = "\n".join(script.split("; ")) if "{" not in script and "do " not in script else ""
    text = f"#!/bin/bash\n{script}\n{commands}\n"
    victim = subprocess.Popen(["sleep", "60"], env={})
    monkeypatch.setenv(PROCESS, str(victim.pid))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(PORT, str(server.getsockname()[1]))
        original_contents = contents(folder)
        shell_script.expand_script(text, folder / "hostile.sh", [], {})
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
    assert contents(folder) == original_contents
    assert processes(str(folder)) == []
    assert victim.poll() is None
    victim.kill()
    victim.wait()


def test_the_scripts_would_do_harm(folder: Path) -> None:
    """The checks see the effects of a script that bash runs."""
    original_contents = contents(folder)
    os.system("bash -c './evil; echo x > victim/file'; sleep 3 &")
    assert (folder / "executed").exists()
    assert contents(folder) != original_contents
    assert processes(str(folder))


def test_exported_functions_and_bash_env_are_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASH_FUNC_seq%%", f"() {{ : > {folder}/executed; }}")
    monkeypatch.setenv("BASH_ENV", str(folder / "evil"))
    monkeypatch.setenv("LD_DEBUG", "all")
    monkeypatch.setenv("LD_DEBUG_OUTPUT", str(folder / "executed"))
    text = 'torchrun x.py --layers $(seq 2 2) "$BASH_ENV"\n'
    expansion = shell_script.expand_script(text, folder / "a.sh", [], {})
    assert expansion.records[0].words == ["torchrun", "x.py", "--layers", "2", ""]
    assert not (folder / "executed").exists()
