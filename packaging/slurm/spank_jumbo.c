/*
 * SPANK plugin: puts the programs of Slurm jobs on huge pages. docs/slurm.md has its use.
 *
 *   gcc -O2 -Wall -Wextra -fPIC -shared -o spank_jumbo.so spank_jumbo.c
 *
 * A SPANK plugin fits the release of Slurm whose headers it was built with, so a site builds it. JUMBO and POOL name the
 * command and the program beside this file, as they are installed on the nodes.
 *
 * Privilege: the command that knows a task's environment runs as the job's user, in the task's own process, after slurmstepd
 * has become that user. Root's part (prolog, epilog) hands integers alone to POOL.
 *
 * Invariant: no function returns an error but for an option that is wrong when a job is submitted. A job starts plain where
 * jumbo cannot help.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(jumbo, 1);

#ifndef JUMBO
#define JUMBO "/usr/bin/jumbo"
#endif
#ifndef POOL
#define POOL "/usr/lib/jumbo/slurm/jumbo-pool"
#endif
/* A file for each job with a pool on this node; POOL has the format. */
#define HOLDS "/run/jumbo/slurm/jobs"

enum { PAGE_BYTES = 2 << 20, ANSWER_SECONDS = 10, ANSWER_BYTES = 64 << 10, NAME_BYTES = 256 };

/* The job's options, as slurmstepd hears of them. */
static int is_covered, has_pool;
static char *profile;
/* A sentence for the job about its pool, made by root. */
static char pool_note[2 * NAME_BYTES];

static int on_jumbo(int val, const char *argument, int remote);
static int on_pool(int val, const char *argument, int remote);

static struct spank_option jumbo_option = {
	.name = "jumbo", .arginfo = "PROFILE",
	.usage = "Run the job's programs on huge pages; =PROFILE may be left out: `jumbo run --profile`",
	.has_arg = 2, .cb = on_jumbo,
};
static struct spank_option pool_option = {
	.name = "jumbo-pool", .arginfo = "SIZE",
	.usage = "Add SIZE (such as 64G) to the kernel's pool of 2M pages, on each node of the job and until its end",
	.has_arg = 1, .cb = on_pool,
};

/* SIZE (512M, 64G, 1T) in pages, rounded up; 0 where it is no size. */
static uint64_t pages_of(const char *size)
{
	static const char units[] = "kmgt";
	char *end;

	if (!size || !isdigit((unsigned char)*size))
		return 0;
	errno = 0;
	uintmax_t number = strtoumax(size, &end, 10);
	const char *unit = *end ? strchr(units, tolower((unsigned char)*end)) : NULL;
	if (errno || !unit || end[1])
		return 0;
	int shift = 10 * (int)(unit - units + 1);
	if (number > ((uintmax_t)INT64_MAX >> shift))
		return 0;
	return ((number << shift) + PAGE_BYTES - 1) / PAGE_BYTES;
}

static int on_jumbo(int val, const char *argument, int remote)
{
	(void)val, (void)remote;
	is_covered = 1;
	free(profile);
	/* srun hands an argument that is left out as "(null)" to the nodes. */
	profile = argument && *argument && strcmp(argument, "(null)") ? strdup(argument) : NULL;
	return 0;
}

static int on_pool(int val, const char *argument, int remote)
{
	(void)val;
	has_pool = 1;
	if (pages_of(argument) || remote)
		return 0;
	slurm_error("--jumbo-pool takes a size with a unit, such as 512M or 64G, and not `%s`", argument ? argument : "");
	return -1;
}

/* The name of the node, by which two slurmd of one machine differ. Not from the environment of the job. */
static const char *node(void)
{
	static char name[NAME_BYTES];
	const char *told = getenv("SLURMD_NODENAME");

	if (told && strlen(told) < sizeof name)
		strcpy(name, told);
	else if (!*name && gethostname(name, sizeof name - 1))
		strcpy(name, "unknown");
	name[strcspn(name, "/")] = '\0';
	return name;
}

/* The largest sum of all pools, in pages: `pool_max=SIZE` in plugstack.conf. */
static uint64_t pool_max(int ac, char **av)
{
	uint64_t pages = 0;

	for (int i = 0; i < ac; i++)
		if (!strncmp(av[i], "pool_max=", 9))
			pages = pages_of(av[i] + 9);
	return pages;
}

/* Runs POOL as root with an environment of its own. `is_waited`: else it goes on by itself. */
static void run_pool(const char *action, uint32_t job, uint64_t pages, uint64_t most, int is_waited)
{
	char numbers[3][24], path[2 * NAME_BYTES] = "PATH=/usr/sbin:/usr/bin:/sbin:/bin", conf[2 * NAME_BYTES] = "";
	char slurmd[NAME_BYTES];
	const char *file = getenv("SLURM_CONF");
	int status;

	snprintf(numbers[0], sizeof numbers[0], "%" PRIu32, job);
	snprintf(numbers[1], sizeof numbers[1], "%" PRIu64, pages);
	snprintf(numbers[2], sizeof numbers[2], "%" PRIu64, most);
	/* squeue is in the folder `bin` beside slurmd's. */
	ssize_t length = readlink("/proc/self/exe", slurmd, sizeof slurmd - 1);
	if (length > 0) {
		slurmd[length] = '\0';
		*strrchr(slurmd, '/') = '\0';
		snprintf(path, sizeof path, "PATH=/usr/sbin:/usr/bin:/sbin:/bin:%s/../bin", slurmd);
	}
	if (file && strlen(file) < NAME_BYTES)
		snprintf(conf, sizeof conf, "SLURM_CONF=%s", file);
	char *arguments[] = {POOL, JUMBO, (char *)action, (char *)node(), numbers[0], numbers[1], numbers[2], NULL};
	char *environment[] = {path, *conf ? conf : NULL, NULL};

	pid_t child = fork();
	if (child == 0) {
		sigset_t none;
		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		/* init waits for a child that goes on. */
		if (!is_waited && (setsid() < 0 || fork() != 0))
			_exit(0);
		/* slurmd's pipes and sockets are not its own. */
		int null = open("/dev/null", O_RDWR);
		for (int file = 0; file <= 2; file++)
			dup2(null, file);
		for (int file = 3; file < 1024; file++)
			close(file);
		execve(POOL, arguments, environment);
		_exit(127);
	}
	if (child < 0) {
		slurm_error("jumbo: cannot start " POOL ": %s; the pool stays as it is", strerror(errno));
		return;
	}
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
}

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	if (spank_context() == S_CTX_SLURMD) {
		/* slurmd may have been away while jobs ended. */
		if (!access(HOLDS, F_OK))
			run_pool("sweep", 0, 0, 0, 0);
		return ESPANK_SUCCESS;
	}
	if (spank_option_register(sp, &jumbo_option) || spank_option_register(sp, &pool_option))
		slurm_error("jumbo: cannot register --jumbo and --jumbo-pool");
	return ESPANK_SUCCESS;
}

int slurm_spank_job_prolog(spank_t sp, int ac, char **av)
{
	char *size = NULL;
	uint32_t job;

	if (spank_option_getopt(sp, &pool_option, &size) || spank_get_item(sp, S_JOB_ID, &job))
		return ESPANK_SUCCESS;
	/* The user's text ends here. */
	uint64_t pages = pages_of(size), most = pool_max(ac, av);
	if (pages && most)
		run_pool("grow", job, pages, most, 1);
	return ESPANK_SUCCESS;
}

int slurm_spank_job_epilog(spank_t sp, int ac, char **av)
{
	uint32_t job;

	(void)ac, (void)av;
	/* By its file, whatever the job's options are by now. */
	if (!access(HOLDS, F_OK) && !spank_get_item(sp, S_JOB_ID, &job))
		run_pool("back", job, 0, 0, 1);
	return ESPANK_SUCCESS;
}

/* In slurmstepd, as root: the pool that the prolog got. */
int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	char path[2 * NAME_BYTES], why[NAME_BYTES] = "";
	uint64_t asked, before, got;
	uint32_t job;

	if (!has_pool || spank_context() != S_CTX_REMOTE || spank_get_item(sp, S_JOB_ID, &job))
		return ESPANK_SUCCESS;
	snprintf(path, sizeof path, HOLDS "/%" PRIu32 ".%s", job, node());
	FILE *file = fopen(path, "re");
	int fields = file ? fscanf(file, "%" SCNu64 " %" SCNu64 " %" SCNu64 " %255[^\n]", &asked, &before, &got, why) : 0;
	if (file)
		fclose(file);
	if (fields >= 3 && got < asked)
		snprintf(pool_note, sizeof pool_note, "%" PRIu64 "M of %" PRIu64 "M came for --jumbo-pool: %s", 2 * got,
			 2 * asked, why);
	else if (fields < 3)
		snprintf(pool_note, sizeof pool_note, "no pool for --jumbo-pool: %s",
			 pool_max(ac, av) ? "the prolog made none; hint: slurmd reads plugstack.conf when it starts" : "plugstack.conf has no pool_max=SIZE");
	return ESPANK_SUCCESS;
}

/* The value of `name`, or "". */
static const char *value(char **environment, const char *name)
{
	size_t length = strlen(name);

	for (; *environment; environment++)
		if (!strncmp(*environment, name, length) && (*environment)[length] == '=')
			return *environment + length + 1;
	return "";
}

/* Takes the entries that end with `end` out of a list. */
static void drop(spank_t sp, char **environment, const char *name, const char *end)
{
	char *list = strdup(value(environment, name)), *rest = list ? malloc(strlen(list) + 1) : NULL, *next = list;
	size_t length = 0, tail = strlen(end);

	if (rest) {
		for (char *entry; (entry = strsep(&next, ": "));) {
			size_t size = strlen(entry);
			if (!size || (size >= tail && !strcmp(entry + size - tail, end)))
				continue;
			length += sprintf(rest + length, "%s%s", length ? ":" : "", entry);
		}
		if (length)
			spank_setenv(sp, name, rest, 1);
		else
			spank_unsetenv(sp, name);
	}
	free(rest);
	free(list);
}

/* Takes out what jumbo set in a batch script of another node, whose srun hands its environment on. */
static void uncover(spank_t sp, char **environment)
{
	if (!*value(environment, "JUMBO_ORDERS"))
		return;
	drop(sp, environment, "LD_PRELOAD", "/libjumbo_preload.so");
	spank_unsetenv(sp, "JUMBO_ORDERS");
}

/* Runs `jumbo run --print-env` in the task's environment. Its output and its talk come into two files. */
static int ask(char **environment, int out, int err)
{
	char option[NAME_BYTES] = "--print-env";
	char *arguments[] = {JUMBO, "run", "--print-env", option, NULL};
	int status;

	if (profile && snprintf(option, sizeof option, "--profile=%s", profile) >= (int)sizeof option) {
		dprintf(err, "the name of the profile is too long\n");
		return -1;
	}
	if (!profile)
		arguments[3] = NULL;
	pid_t child = fork();
	if (child == 0) {
		sigset_t none;
		int null = open("/dev/null", O_RDONLY);
		dup2(null, STDIN_FILENO);
		dup2(out, STDOUT_FILENO);
		dup2(err, STDERR_FILENO);
		/* It is ended by SIGALRM where it hangs, on a home that does not answer. */
		signal(SIGALRM, SIG_DFL);
		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		alarm(ANSWER_SECONDS);
		execve(JUMBO, arguments, environment);
		dprintf(STDERR_FILENO, "cannot run " JUMBO ": %s\n", strerror(errno));
		_exit(127);
	}
	if (child < 0) {
		dprintf(err, "cannot start a process: %s\n", strerror(errno));
		return -1;
	}
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			return -1;
	if (WIFSIGNALED(status))
		dprintf(err, JUMBO " was ended by signal %d\n", WTERMSIG(status));
	return status;
}

/* The text of a file, to be freed; NULL where there is too much of it. */
static char *text_of(int file)
{
	char *text = calloc(1, ANSWER_BYTES);

	if (text && pread(file, text, ANSWER_BYTES, 0) < ANSWER_BYTES)
		return text;
	free(text);
	return NULL;
}

/* One line for the job, by one task of the node. */
static void tell(spank_t sp, const char *why, const char *what)
{
	char line[2 * NAME_BYTES];
	int task;

	if (spank_get_item(sp, S_TASK_ID, &task) || task != 0)
		return;
	snprintf(line, sizeof line, "%s", why);
	line[strcspn(line, "\n")] = '\0';
	for (char *byte = line; *byte; byte++)
		if (iscntrl((unsigned char)*byte))
			*byte = '?';
	dprintf(STDERR_FILENO, "jumbo: %s: %s%s\n", node(), strncmp(line, "jumbo: ", 7) ? line : line + 7, what);
}

static int is_name(const char *name)
{
	return *name && !name[strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")];
}

/* In the process of the task, as the user, just before its program. */
int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	char **environment, *text = NULL;

	(void)ac, (void)av;
	if (*pool_note)
		tell(sp, pool_note, "");
	if (!is_covered || spank_get_item(sp, S_JOB_ENV, &environment))
		return ESPANK_SUCCESS;
	int out = memfd_create("jumbo", MFD_CLOEXEC), err = memfd_create("jumbo", MFD_CLOEXEC);
	if (out >= 0 && err >= 0 && ask(environment, out, err) == 0 && (text = text_of(out))) {
		char *next = text;
		for (char *line; (line = strsep(&next, "\n"));) {
			char *equals = strchr(line, '=');
			/* A library that the job preloads may write there too. */
			if (!equals)
				continue;
			*equals = '\0';
			if (is_name(line))
				spank_setenv(sp, line, equals + 1, 1);
		}
	} else {
		uncover(sp, environment);
		text = err >= 0 ? text_of(err) : NULL;
		tell(sp, text && *text ? text : "cannot tell what " JUMBO " would set", "; the job runs without jumbo");
	}
	free(text);
	close(out);
	close(err);
	return ESPANK_SUCCESS;
}
